"""Finds the modules of the project and what each imports anywhere in its file: in functions and for types too."""

import ast
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]


@cache
def modules() -> Mapping[str, Path]:
    """Returns all modules of the installed packages by name. A package has the name of its folder."""
    found = {}
    for root in (ROOT / "services", ROOT / "cluster"):
        for file in root.glob("privmix*/**/*.py"):
            found[".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__")] = file
    return found


def is_own(name: str) -> bool:
    return name.partition(".")[0] in ("privmix", "privmix_cluster", "tests")


def imported(module: str) -> Iterator[str]:
    """Yields the modules that a module imports anywhere in its file; of other projects' modules, the names in them."""
    for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                yield f"{node.module}" if is_own(member) and member not in modules() else member


EXTRA_OF: Mapping[str, str] = {
    "privmix.engine": "cpu",
    "privmix.database.limited_connection": "postgresql",
    "privmix.training.demo": "demo",
    "privmix.laboratory": "lab",
    "privmix.laboratory.heads": "heads",
}
"""The extra whose packages a module, or every module of a package, may import. The longest name counts."""

NEVER_REQUIRED = {"triton", "_typeshed"}
"""A build of torch for CUDA brings Triton. Type checkers alone know `_typeshed`."""


def extra_of(module: str) -> str | None:
    """Returns the extra whose packages a module may import; None if it works without extras."""
    names = [name for name in EXTRA_OF if f"{module}.".startswith(f"{name}.")]
    return EXTRA_OF[max(names, key=len)] if names else None


def foreign(module: str) -> set[str]:
    """Returns the names that a module imports of packages which neither Python nor privmix brings."""
    known = NEVER_REQUIRED | sys.stdlib_module_names
    return {name for name in imported(module) if not is_own(name) and name.partition(".")[0] not in known}
