"""Claim: packages import in one direction only, and the server does not import the laboratory.

Counts every import: also those in functions, those for types alone, and those of a package's own modules.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LAYERS: tuple[set[str], ...] = (
    {"cpus", "errors", "files", "metrics", "progress", "tracing"},
    {"privacy", "engine", "structure"},
    {"database", "fan_out", "options", "ray_session", "reduction"},
    {"budget", "keys", "shard", "training"},
    {"ensembles", "fleet", "generation"},
    {"coordinator"},
    {"requests"},
    {"batches", "alerts"},
    {"gateway"},
)
"""The packages of the server, from the lowest. A package imports only lower ones."""

INDEPENDENT = {"errors", "files", "metrics", "tracing", "privacy", "engine", "progress", "structure"}
"""The packages that import no other one but the errors, which import nothing. `privacy` is mathematics only."""

LABORATORY_COMMANDS = {"audit", "compare", "evaluate", "evaluate_task", "generate", "heads", "tune"}
"""The verbs of the laboratory: files in `cluster/commands` and `cluster/work`. The rest of `cluster` is the server."""


@cache
def modules() -> Mapping[str, Path]:
    """Returns all modules of the installed packages by name. A package has the name of its folder."""
    files = [file for folder in ("services", "cluster") for file in (ROOT / folder).rglob("*.py")]
    return {".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file for file in files}


def imported(module: str) -> Iterator[str]:
    """Yields the modules that a module imports anywhere in its file."""
    for node in ast.walk(ast.parse(modules()[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: imports are absolute"
            for alias in node.names:
                member = f"{node.module}.{alias.name}"
                yield member if member in modules() else node.module or ""


@cache
def arrows() -> Mapping[str, frozenset[str]]:
    """Returns the modules of this repository that each module imports."""
    return {
        module: frozenset(
            name for name in imported(module) if name.partition(".")[0] in ("services", "cluster", "tests")
        )
        for module in modules()
    }


def package(module: str) -> str:
    """Returns the package of a module: two names, three in the laboratory, and one for `cluster`."""
    names = module.split(".")
    if names[0] == "cluster":
        return "cluster"
    return ".".join(names[: 3 if names[1:2] == ["laboratory"] else 2])


def is_laboratory(module: str) -> bool:
    names = module.split(".")
    verbs = names[:2] in (["cluster", "commands"], ["cluster", "work"]) and len(names) > 2
    return (verbs and names[2] in LABORATORY_COMMANDS) or names[:2] == ["services", "laboratory"]


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Returns the members of a cycle; empty if there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_module_imports_itself_through_others() -> None:
    assert not cycle({module: {name for name in names if name in modules()} for module, names in arrows().items()})


def test_no_package_imports_itself_through_others() -> None:
    graph: dict[str, set[str]] = {}
    for module, names in arrows().items():
        graph.setdefault(package(module), set()).update({package(name) for name in names} - {package(module)})
    assert not cycle(graph)


def test_the_server_imports_neither_the_laboratory_nor_the_tests() -> None:
    wrong = {
        (module, name)
        for module, names in arrows().items()
        for name in names
        if name.startswith("tests") or (is_laboratory(name) and not is_laboratory(module))
    }
    assert not wrong


def test_every_package_of_the_server_imports_only_lower_ones() -> None:
    layer_of = {f"services.{name}": number for number, layer in enumerate(LAYERS) for name in layer}
    servers = {
        module
        for module in modules()
        if module.startswith("services.") and not module.startswith("services.laboratory")
    }
    assert {package(module) for module in servers} == set(layer_of), "LAYERS names every package of the server"
    wrong = [
        (module, name)
        for module in servers
        for name in arrows()[module]
        if package(name) != package(module) and layer_of.get(package(name), len(LAYERS)) >= layer_of[package(module)]
    ]
    assert not wrong


@pytest.mark.parametrize("name", sorted(INDEPENDENT))
def test_independent_packages_import_no_other_package(name: str) -> None:
    own = f"services.{name}"
    names = {name for module in modules() if package(module) == own for name in arrows()[module]}
    assert {package(name) for name in names} <= {own, "services.errors"}


def test_services_do_not_import_the_command_line() -> None:
    assert not [
        module
        for module, names in arrows().items()
        if module.startswith("services")
        for name in names
        if name.startswith("cluster")
    ]


def test_a_cycle_is_found() -> None:
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}
    assert not cycle({"a": {"b"}, "b": {"c"}})
