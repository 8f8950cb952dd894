"""Claim: an ensemble counts as drained only when no gateway has a request for it or can still accept one."""

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from privmix.ensembles.actor import Ensembles
from privmix.ensembles.records import ServedEnsemble
from privmix.ensembles.registry import HEARTBEAT_TIMEOUT_S, Registry
from privmix.foundation.errors import EnsemblesError
from tests.served import served


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ensemble(*names: str, **changes: Any) -> ServedEnsemble:
    return served(*names, model=Path("m"), namespace=f"privmix.{names[0]}", **changes)


CLINIC, COURT = ensemble("clinic"), ensemble("court", "tribunal")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> Registry:
    registry = Registry(clock=clock)
    registry.replace([CLINIC, COURT])
    return registry


def states(registry: Registry) -> dict[str, str]:
    return {entry.ensemble.name: entry.state for entry in registry.current.entries}


def test_a_gateway_with_an_old_version_of_the_list_may_still_accept_a_request(registry: Registry) -> None:
    before = registry.heartbeat("gateway-1", 0, {}).version
    registry.heartbeat("gateway-2", before, {})
    registry.drain("court")
    for gateways, drained in ((("gateway-1",), False), (("gateway-1", "gateway-2"), True)):
        for gateway in gateways:
            registry.heartbeat(gateway, registry.current.version, {"clinic": 3})
        assert registry.status("court").drained is drained
    assert not registry.status("clinic").drained, "it serves"


@pytest.mark.parametrize("added", [ensemble("health"), ensemble("school", cohort="court")])
def test_no_name_is_that_of_a_cohort_and_of_an_ensemble(registry: Registry, added: ServedEnsemble) -> None:
    registry.add(ensemble("ward", cohort="health"))
    registry.add(ensemble("surgery", cohort="health"))
    with pytest.raises(EnsemblesError, match="for a cohort and for an ensemble"):
        registry.add(added)


def test_requests_end_before_an_ensemble_is_removed(registry: Registry) -> None:
    registry.drain("tribunal")
    registry.heartbeat("gateway-1", registry.current.version, {"court": 2})
    assert (registry.status("court").live, registry.status("court").drained) == (2, False)
    with pytest.raises(EnsemblesError, match="still has requests"):
        registry.remove("court")
    registry.heartbeat("gateway-1", registry.current.version, {"court": 0})
    registry.remove("court")
    assert states(registry) == {"clinic": "serving"}
    with pytest.raises(EnsemblesError, match="no such ensemble; this service has: clinic"):
        registry.drain("court")


def test_a_gateway_without_heartbeats_does_not_delay_draining(registry: Registry, clock: Clock) -> None:
    registry.heartbeat("gone", 0, {"court": 1})
    registry.drain("court")
    clock.now += HEARTBEAT_TIMEOUT_S + 1
    assert registry.status("court").drained


def test_an_ensemble_is_not_drained_before_every_gateway_had_time_for_a_heartbeat(
    registry: Registry, clock: Clock
) -> None:
    registry.drain("court")
    assert not registry.status("court").drained, "a gateway may exist that has not sent a heartbeat"
    clock.now += HEARTBEAT_TIMEOUT_S
    assert registry.status("court").drained


def test_every_change_has_a_version_of_its_own(registry: Registry) -> None:
    versions = [registry.current.version]
    for change in (lambda: registry.drain("court"), lambda: registry.add(COURT), lambda: registry.add(ensemble("a"))):
        change()
        versions.append(registry.current.version)
    assert len(set(versions)) == 4
    registry.add(COURT)
    assert registry.current.version == versions[-1], "nothing changed"
    assert states(registry) == {"clinic": "serving", "court": "serving", "a": "serving"}


def test_two_ensembles_cannot_share_a_name(registry: Registry) -> None:
    with pytest.raises(EnsemblesError, match="another ensemble is served under this name"):
        registry.add(ensemble("new", "tribunal"))


def test_another_ensemble_does_not_resume_a_drained_one(registry: Registry) -> None:
    """Its record is the same but for the id, and its actors would go on with the former one."""
    former, another = (ensemble("ward", cohort="health", ensemble=id_) for id_ in ("former", "another"))
    registry.add(former)
    registry.drain("ward")
    with pytest.raises(EnsemblesError, match="another ensemble is served under this name; retire that one first"):
        registry.add(another)
    assert states(registry)["ward"] == "draining"
    registry.add(former)
    assert states(registry)["ward"] == "serving"


def test_an_ensemble_that_left_the_configuration_drains(registry: Registry) -> None:
    registry.drain("clinic")
    registry.configure([CLINIC, ensemble("school")])
    assert states(registry) == {"clinic": "draining", "school": "serving", "court": "draining"}


@pytest.mark.anyio
async def test_a_restarted_actor_continues_with_the_stored_list(tmp_path: Path) -> None:
    database = str(tmp_path / "keys.db")
    before = Ensembles(database, "privmix")
    await before.replace([CLINIC, COURT])
    await before.drain("court")
    after = Ensembles(database, "privmix")
    assert (await after.current()).entries == (await before.current()).entries
    assert (await Ensembles(database, "another").current()).entries == ()


@pytest.mark.anyio
async def test_an_earlier_version_can_read_the_list_if_nothing_new_is_used(tmp_path: Path) -> None:
    """Extra fields are an error there, so fields that it does not know must be absent."""
    database = str(tmp_path / "service.db")
    await Ensembles(database, "privmix").add(CLINIC)
    with sqlite3.connect(database) as connection:
        ((listed,),) = connection.execute("SELECT listed FROM privmix_ensembles").fetchall()
    assert "clinic" in listed
    assert "cohort" not in listed
