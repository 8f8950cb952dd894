"""Claim: a public class name stands for one thing: no two modules define classes of the same name."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("services", "cluster", "tests/benchmarks")


def public_classes(source: str) -> Iterator[str]:
    """Yields the names of the public classes at the top level of a module."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name


def repeated(sources: Mapping[str, str]) -> dict[str, Sequence[str]]:
    """Returns the class names that several modules define, with the modules. `sources` has the text of each module."""
    modules: dict[str, list[str]] = defaultdict(list)
    for module, source in sources.items():
        for name in public_classes(source):
            modules[name].append(module)
    return {name: where for name, where in modules.items() if len(where) > 1}


def test_no_two_modules_define_a_public_class_of_the_same_name() -> None:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    sources = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}
    assert sum(1 for source in sources.values() for _ in public_classes(source)) > 100, "the modules are found"
    assert not repeated(sources)


def test_a_repeated_name_is_found() -> None:
    sources = {"a": "class Draw: ...\nclass _Row: ...", "b": "class _Row: ...", "c": "class Draw: ..."}
    assert repeated(sources) == {"Draw": ["a", "c"]}
