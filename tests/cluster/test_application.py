"""Claim: the application refuses wrong arguments when Serve builds it. tests/k8s shows that it deploys."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from ray.serve.exceptions import RayServeException

from privmix.budget import actor as budget
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.foundation.errors import ConfigurationError
from privmix.foundation.ray_session import connected
from privmix.keys import actor as keys
from privmix_cluster.application import Arguments, build
from privmix_cluster.checks import check_ensemble
from privmix_cluster.configuration import Configuration
from privmix_cluster.ensemble_actors import _kept_budget, _start_budget
from tests.running import configure, own_ensemble


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    with connected():
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_actors_of_another_promise_are_not_taken_for_ones_own(ensemble: Path, tmp_path: Path) -> None:
    config = configure(tmp_path, own_ensemble(ensemble, tmp_path))
    configuration = Configuration.load(config)
    namespace = configuration.namespace
    with pytest.raises(RayServeException, match="privmix ledger init"):
        build(Arguments(config=config))
    check_ensemble(configuration, may_begin=True)
    terms = PrivacyBudget(ensemble="another", epsilon=1.0, delta=1e-6, order=4.0, adjacency="part, add or remove")
    budget.start(str(tmp_path / "another.db"), terms, namespace=namespace, lifetime="detached")
    with pytest.raises(RayServeException, match="another budget"):
        build(Arguments(config=config))
    assert ray.util.list_named_actors(all_namespaces=True) == [{"name": budget.NAME, "namespace": namespace}]


@pytest.mark.usefixtures("cluster")
def test_a_keys_actor_with_another_database_than_configured_is_not_kept(tmp_path: Path) -> None:
    """A key that is revoked in the configured one would go on."""
    first, second = str(tmp_path / "first.db"), str(tmp_path / "second.db")
    actor = keys.start(first, namespace="kept", lifetime="detached", keep=True)
    assert keys.start(first, namespace="kept", lifetime="detached", keep=True) == actor
    with pytest.raises(ConfigurationError, match=r"keys\.database: kept already serves with the keys in .*first\.db"):
        keys.start(second, namespace="kept", lifetime="detached", keep=True)
    ray.kill(actor)


@pytest.mark.usefixtures("cluster")
def test_running_actors_that_would_ignore_a_changed_setting_are_not_kept(ensemble: Path, tmp_path: Path) -> None:
    """The ledger's would never write a new anchor, which would accept a copy of the ledger later."""
    own = own_ensemble(ensemble, tmp_path)
    for name in ("first", "second"):
        (tmp_path / name).mkdir()

    def load(setting: str = "budget.create", value: object = True) -> Configuration:
        section, name = setting.split(".")
        sections: dict[str, dict[str, object]] = {"budget": {"anchor": str(tmp_path / "first")}}
        sections[section] = sections.get(section, {}) | {name: value}
        return Configuration.load(configure(tmp_path, own, **sections))

    configuration = load()
    checked = check_ensemble(configuration, may_begin=True)
    assert _kept_budget(configuration, checked.promise) is None
    actor = _start_budget(configuration, checked, str(tmp_path / "keys.db"))
    assert _kept_budget(load(), checked.promise) == actor
    for setting, value in (
        ("budget.anchor", str(tmp_path / "second")),
        ("budget.ledger", str(tmp_path / "moved.db")),
        ("budget.signing_key", "0" * 64),
        ("coordinator.max_live", 3),
        ("coordinator.replicas", 2),
    ):
        with pytest.raises(ConfigurationError, match=rf"{setting}: .* already serves with another .* start it"):
            _kept_budget(load(setting, value), checked.promise)
    ray.kill(actor)
