"""Claim: a public name of a type stands for one thing: no two modules define classes or aliases of the same name."""

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("services", "cluster", "tests/benchmarks")
OPTIONS = ("cluster/commands/", "cluster/options.py")
"""These modules name the types of the command line's options by themselves."""


def public_types(source: str, aliases: bool = True) -> Iterator[str]:
    """Yields the names of the public classes at the top level of a module, and of the aliases of types."""
    for node in ast.parse(source).body:
        match node:
            case ast.ClassDef(name=name) if not name.startswith("_"):
                yield name
            case ast.Assign(targets=[ast.Name(id=name)]) if aliases and name[0].isupper() and name.upper() != name:
                yield name


def repeated(sources: Mapping[str, str]) -> dict[str, Sequence[str]]:
    """Returns the names of types that several modules define, with the modules. `sources` has each module's text."""
    modules: dict[str, list[str]] = defaultdict(list)
    for module, source in sources.items():
        for name in public_types(source, aliases=not module.startswith(OPTIONS)):
            modules[name].append(module)
    return {name: where for name, where in modules.items() if len(where) > 1}


def test_no_two_modules_define_a_public_type_of_the_same_name() -> None:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    sources = {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in files}
    assert sum(1 for source in sources.values() for _ in public_types(source)) > 100, "the modules are found"
    assert not repeated(sources)


def test_a_repeated_name_is_found() -> None:
    sources = {
        "a": "class Draw: ...\nclass _Row: ...\nT = int\nKINDS = ()",
        "b": "class _Row: ...\nT = str\nKINDS = ()",
        "c": "Draw = tuple[int, ...]",
    }
    assert repeated(sources) == {"Draw": ["a", "c"]}
