"""The ensembles of a service, and the requests that each gateway has for them. Plain data; no I/O."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from services.ensembles.records import Account, Ensemble, EnsemblesError, Listed, State, View

SILENT_S = 30.0
"""A gateway that has not looked for this long is gone. For this long after a start, a gateway may exist that has not
looked yet."""

Clock = Callable[[], float]


@dataclass(frozen=True)
class _Look:
    """The last look of a gateway: its time, the version that the gateway acted on, and its requests by ensemble."""

    at: float
    version: int
    live: Mapping[str, int]


class Register:
    """The ensembles of a service, in the order in which they came.

    Each gateway looks every second, and reports its live requests and the version that it acts on. An ensemble is
    drained once every live gateway acts on the present version and has no request for it: then no request can come.
    """

    def __init__(self, listed: Iterable[Listed] = (), clock: Clock = time.monotonic) -> None:
        self._listed = {each.ensemble.name: each for each in listed}
        self._clock = clock
        self._began = clock()
        self._version = time.time_ns()
        self._looks: dict[str, _Look] = {}

    @property
    def view(self) -> View:
        return View(version=self._version, listed=tuple(self._listed.values()))

    def look(self, gateway: str, version: int, live: Mapping[str, int]) -> View:
        """Record the state of a gateway, and return the present list."""
        self._looks[gateway] = _Look(self._clock(), version, dict(live))
        return self.view

    def add(self, ensemble: Ensemble) -> None:
        """Serve an ensemble; one that drains serves again.

        Raises:
            EnsemblesError: one of its names is taken.
        """
        for other in self._listed.values():
            if other.ensemble != ensemble and not set(other.ensemble.names).isdisjoint(ensemble.names):
                raise EnsemblesError(
                    f"ensembles.{ensemble.name}: another ensemble is served under this name; retire that one first, "
                    "or take another name"
                )
        self._put(Listed(ensemble=ensemble))

    def drain(self, name: str) -> None:
        """Let an ensemble take no new requests.

        Raises:
            EnsemblesError: there is none of this name.
        """
        self._put(Listed(ensemble=self._named(name).ensemble, state="draining"))

    def remove(self, name: str) -> None:
        """Forget an ensemble.

        Raises:
            EnsemblesError: there is none of this name, or requests for it may be under way.
        """
        if not self.account(name).drained:
            raise EnsemblesError(f"ensembles.{name}: requests for it are under way; drain it, and wait for their end")
        del self._listed[name]
        self._change()

    def replace(self, ensembles: Iterable[Ensemble]) -> None:
        """Serve these and forget all others."""
        self._listed = {ensemble.name: Listed(ensemble=ensemble) for ensemble in ensembles}
        self._change()

    def configure(self, ensembles: Iterable[Ensemble]) -> None:
        """Serve these; others drain, and one of these that drains already goes on doing so."""
        before = self._listed
        states: dict[str, State] = {name: each.state for name, each in before.items()}
        self._listed = {each.name: Listed(ensemble=each, state=states.get(each.name, "serving")) for each in ensembles}
        for name, other in before.items():
            self._listed.setdefault(name, Listed(ensemble=other.ensemble, state="draining"))
        self._change()

    def accounts(self) -> list[Account]:
        return [self.account(name) for name in self._listed]

    def account(self, name: str) -> Account:
        """
        Raises:
            EnsemblesError: there is none of this name.
        """
        listed = self._named(name)
        now = self._clock()
        looks = [look for look in self._looks.values() if now - look.at < SILENT_S]
        known = all(look.version == self._version for look in looks) and (bool(looks) or now - self._began >= SILENT_S)
        live = sum(look.live.get(name, 0) for look in looks)
        return Account(
            ensemble=listed.ensemble,
            state=listed.state,
            live=live,
            known=known,
            drained=listed.state == "draining" and known and not live,
        )

    def _named(self, name: str) -> Listed:
        for listed in self._listed.values():
            if name in listed.ensemble.names:
                return listed
        there = ", ".join(self._listed) or "none"
        raise EnsemblesError(f"ensembles.{name}: there is no such ensemble; there are: {there}")

    def _put(self, listed: Listed) -> None:
        if self._listed.get(listed.ensemble.name) != listed:
            self._listed[listed.ensemble.name] = listed
            self._change()

    def _change(self) -> None:
        self._version += 1
