"""Claim: no ensemble joins a cohort beside one that the service still runs and that may share its users."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import ray
import yaml

from privmix.ensembles import actor as ensembles
from privmix.ensembles.records import ServedEnsemble
from privmix.ensembles.registry import Registry
from privmix.foundation.errors import ConfigurationError
from privmix.foundation.ray_session import connected
from privmix.training.manifest import Apart, Manifest
from privmix_cluster.application import Arguments, build
from privmix_cluster.checks import check_cohorts, check_ensemble
from privmix_cluster.configuration import Configuration
from privmix_cluster.work.ensembles import check_members
from tests.running import configure, own_ensemble
from tests.served import served


class Corpora:
    """Ensembles of one cohort in directories of their own, each kept apart from those that it names as earlier."""

    def __init__(self, folder: Path, trained: Path) -> None:
        self.folder = folder
        self._trained = trained

    def train(self, name: str, earlier: Sequence[str] = (), id_: str | None = None) -> None:
        shutil.copytree(self._trained, self.folder / name, dirs_exist_ok=True)
        others = [Manifest.load(self.folder / other) for other in earlier]
        apart = tuple(Apart(ensemble=other.ensemble, marks=other.marks or "") for other in others)
        changes = {"ensemble": id_ or name, "marks": "0" * 64, "disjoint_from": apart}
        Manifest.load(self.folder / name).model_copy(update=changes).save(self.folder / name)

    def file(self, *names: str, cohort: str | None = "clinic") -> Configuration:
        named = {name: {"ensemble": str(self.folder / name), "cohort": cohort} for name in names}
        return Configuration.of({"ensembles": named}, self.folder)


def record(name: str, id_: str | None = None, cohort: str = "clinic") -> ServedEnsemble:
    return served(name, model=Path("m"), namespace=f"privmix.{name}", cohort=cohort, ensemble=id_ or name)


@pytest.fixture
def corpora(ensemble: Path, tmp_path: Path) -> Corpora:
    corpora = Corpora(tmp_path, own_ensemble(ensemble, tmp_path))
    corpora.train("c2026")
    corpora.train("c2027", earlier=["c2026"])
    corpora.train("all2028", earlier=["c2027"])  # on everybody of 2026 again
    return corpora


def test_a_record_names_the_ensemble_of_a_cohort_by_its_id(corpora: Corpora) -> None:
    """Without a cohort it has no id, so that an earlier version can read the list."""
    apart, alone = corpora.file("c2026").choose(), corpora.file("c2026", cohort=None).choose()
    assert check_ensemble(apart, may_begin=True).served.ensemble == "c2026"
    assert check_ensemble(alone).served.ensemble is None


def test_an_ensemble_that_a_deployment_drains_keeps_those_of_its_users_out_of_the_cohort(corpora: Corpora) -> None:
    registry = Registry()
    registry.replace([record("c2026"), record("c2027")])
    after = corpora.file("c2027", "all2028")
    check_cohorts(after)
    registry.configure([record("c2027")])
    running = [status.ensemble for status in registry.statuses()]
    assert [status.state for status in registry.statuses()] == ["serving", "draining"]
    with pytest.raises(ConfigurationError, match=r"ensembles\.c2026: .*privmix ensembles retire c2026"):
        check_members(after, "clinic", running)
    check_members(after, "clinic", [record("c2027")])
    check_members(corpora.file("c2027"), "clinic", running)  # nothing joins: a deployment may leave one out


def test_another_ensemble_under_the_name_of_a_served_one_is_not_taken_for_it(corpora: Corpora) -> None:
    file = corpora.file("c2026", "c2027")
    check_members(file, "clinic", [record("c2026")])
    for former in (record("c2026", "an earlier one"), record("c2026").model_copy(update={"ensemble": None})):
        with pytest.raises(ConfigurationError, match=r"ensembles\.c2026: .*privmix ensembles retire c2026"):
            check_members(file, "clinic", [former])


def test_a_member_that_the_file_has_outside_the_cohort_is_not_taken_as_checked(corpora: Corpora) -> None:
    names = ("c2026", "all2028")
    named = {name: {"ensemble": str(corpora.folder / name)} for name in names}
    named["all2028"]["cohort"] = "clinic"
    file = Configuration.of({"ensembles": named}, corpora.folder)
    check_cohorts(file)
    with pytest.raises(ConfigurationError, match=r"ensembles\.c2026: .* cannot be checked"):
        check_members(file, "clinic", [record("c2026")])


def test_a_deployment_is_refused_before_it_starts_an_ensemble_of_users_that_are_still_served(
    corpora: Corpora, tmp_path: Path
) -> None:
    with connected():
        named = {name: {"ensemble": str(tmp_path / name), "cohort": "clinic"} for name in ("c2027", "all2028")}
        config = configure(tmp_path, tmp_path / "c2027", ensembles=named)
        config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | {"ensemble": None}))
        namespace = Configuration.load(config).namespace
        listed = [record("c2026"), record("c2027")]
        service = ensembles.start(str(tmp_path / "keys.db"), listed, namespace=namespace)
        with pytest.raises(ConfigurationError, match=r"ensembles\.c2026"):
            build(Arguments(config=config))
        ray.kill(service)
