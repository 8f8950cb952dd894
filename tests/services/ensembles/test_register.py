"""An ensemble is drained once no gateway has, or can still take, a request for it."""

from pathlib import Path
from typing import Any

import pytest

from services.ensembles.actor import Ensembles
from services.ensembles.records import Ensemble, EnsemblesError
from services.ensembles.register import SILENT_S, Register


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ensemble(*names: str, **changes: Any) -> Ensemble:
    return Ensemble(
        **{"names": names, "namespace": f"privmix.{names[0]}", "model": Path("m"), "context_length": 8, **changes}
    )


CLINIC, COURT = ensemble("clinic"), ensemble("court", "tribunal")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def register(clock: Clock) -> Register:
    register = Register(clock=clock)
    register.replace([CLINIC, COURT])
    return register


def states(register: Register) -> dict[str, str]:
    return {each.ensemble.name: each.state for each in register.view.listed}


def test_a_gateway_that_has_not_heard_may_still_take_a_request(register: Register) -> None:
    before = register.look("one", 0, {}).version
    register.look("two", before, {})
    register.drain("court")
    for heard, drained in ((("one",), False), (("one", "two"), True)):
        for gateway in heard:
            register.look(gateway, register.view.version, {"clinic": 3})
        assert register.account("court").drained is drained
    assert not register.account("clinic").drained, "it serves"


def test_requests_end_before_an_ensemble_is_removed(register: Register) -> None:
    register.drain("tribunal")
    register.look("one", register.view.version, {"court": 2})
    assert (register.account("court").live, register.account("court").drained) == (2, False)
    with pytest.raises(EnsemblesError, match="under way"):
        register.remove("court")
    register.look("one", register.view.version, {"court": 0})
    register.remove("court")
    assert states(register) == {"clinic": "serving"}
    with pytest.raises(EnsemblesError, match="no such ensemble; there are: clinic"):
        register.drain("court")


def test_a_gateway_that_is_gone_is_not_waited_for(register: Register, clock: Clock) -> None:
    register.look("gone", 0, {"court": 1})
    register.drain("court")
    clock.now += SILENT_S + 1
    assert register.account("court").drained


def test_nobody_is_known_just_after_a_start(register: Register, clock: Clock) -> None:
    register.drain("court")
    assert not register.account("court").drained, "a gateway may be there that has not looked yet"
    clock.now += SILENT_S
    assert register.account("court").drained


def test_every_change_has_a_version(register: Register) -> None:
    versions = [register.view.version]
    for change in (lambda: register.drain("court"), lambda: register.add(COURT), lambda: register.add(ensemble("a"))):
        change()
        versions.append(register.view.version)
    assert len(set(versions)) == 4
    register.add(COURT)
    assert register.view.version == versions[-1], "nothing changed"
    assert states(register) == {"clinic": "serving", "court": "serving", "a": "serving"}


def test_a_name_that_is_taken(register: Register) -> None:
    with pytest.raises(EnsemblesError, match="another ensemble is served under this name"):
        register.add(ensemble("new", "tribunal"))


def test_what_left_the_configuration_drains(register: Register) -> None:
    register.drain("clinic")
    register.configure([CLINIC, ensemble("school")])
    assert states(register) == {"clinic": "draining", "school": "serving", "court": "draining"}


@pytest.mark.anyio
async def test_an_actor_that_is_made_again_goes_on(tmp_path: Path) -> None:
    database = str(tmp_path / "keys.db")
    before = Ensembles(database, "privmix")
    await before.replace([CLINIC, COURT])
    await before.drain("court")
    after = Ensembles(database, "privmix")
    assert (await after.view()).listed == (await before.view()).listed
    assert (await Ensembles(database, "another").view()).listed == ()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
