"""Keeps the list of a service's ensembles, and how many requests each gateway has for them. Does no I/O."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from privmix.ensembles.records import EnsembleEntry, EnsembleList, EnsembleStatus, ServedEnsemble, State
from privmix.foundation.errors import EnsemblesError

HEARTBEAT_TIMEOUT_S = 30.0
"""A gateway without a heartbeat for this long is considered gone. For this long after a start, a gateway may exist that
has not sent its first heartbeat."""


@dataclass(frozen=True)
class _Heartbeat:
    """Holds the last heartbeat of a gateway: its time, the list version that it served, and its live requests."""

    time: float
    version: int
    live: Mapping[str, int]


class Registry:
    """Holds the ensembles of a service in the order in which they were added.

    Each gateway sends a heartbeat every second with its live requests and the list version that it serves. An ensemble
    is drained once every live gateway serves the current version and has no request for it: then none can arrive.
    """

    def __init__(self, entries: Iterable[EnsembleEntry] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._entries = {entry.ensemble.name: entry for entry in entries}
        self._clock = clock
        self._started = clock()
        self._version = time.time_ns()
        self._heartbeats: dict[str, _Heartbeat] = {}

    @property
    def current(self) -> EnsembleList:
        """The current list."""
        return EnsembleList(version=self._version, entries=tuple(self._entries.values()))

    def heartbeat(self, gateway: str, version: int, live: Mapping[str, int]) -> EnsembleList:
        """Records the state of a gateway and returns the current list."""
        self._heartbeats[gateway] = _Heartbeat(self._clock(), version, dict(live))
        return self.current

    def add(self, ensemble: ServedEnsemble) -> None:
        """Adds an ensemble, or resumes one that drains.

        Raises:
            EnsemblesError: another ensemble uses one of its names.
        """
        cohorts = {entry.ensemble.cohort for entry in self._entries.values()}
        names = {name for entry in self._entries.values() for name in entry.ensemble.names}
        if not cohorts.isdisjoint(ensemble.names) or ensemble.cohort in names:
            raise EnsemblesError(
                f"ensembles.{ensemble.name}: a name is used for a cohort and for an ensemble; rename one of them"
            )
        for other in self._entries.values():
            if other.ensemble != ensemble and not set(other.ensemble.names).isdisjoint(ensemble.names):
                raise EnsemblesError(
                    f"ensembles.{ensemble.name}: another ensemble is served under this name; retire that one first, "
                    "or take another name"
                )
        self._put(EnsembleEntry(ensemble=ensemble))

    def drain(self, name: str) -> None:
        """Stops new requests for an ensemble.

        Raises:
            EnsemblesError: no ensemble has this name.
        """
        self._put(EnsembleEntry(ensemble=self._named(name).ensemble, state="draining"))

    def remove(self, name: str) -> None:
        """Removes an ensemble.

        Raises:
            EnsemblesError: no ensemble has this name, or it may still have requests.
        """
        if not self.status(name).drained:
            raise EnsemblesError(f"ensembles.{name}: it still has requests; drain it and wait until they end")
        del self._entries[name]
        self._change()

    def replace(self, ensembles: Iterable[ServedEnsemble]) -> None:
        """Replaces the list."""
        self._entries = {ensemble.name: EnsembleEntry(ensemble=ensemble) for ensemble in ensembles}
        self._change()

    def configure(self, ensembles: Iterable[ServedEnsemble]) -> None:
        """Adds the configured ensembles and drains all others. A configured ensemble that drains continues to drain."""
        before = self._entries
        states: dict[str, State] = {name: entry.state for name, entry in before.items()}
        self._entries = {
            ensemble.name: EnsembleEntry(ensemble=ensemble, state=states.get(ensemble.name, "serving"))
            for ensemble in ensembles
        }
        for name, other in before.items():
            self._entries.setdefault(name, EnsembleEntry(ensemble=other.ensemble, state="draining"))
        self._change()

    def statuses(self) -> list[EnsembleStatus]:
        """Returns the status of every ensemble."""
        return [self.status(name) for name in self._entries]

    def status(self, name: str) -> EnsembleStatus:
        """Returns the status of an ensemble.

        Raises:
            EnsemblesError: no ensemble has this name.
        """
        entry = self._named(name)
        now = self._clock()
        recent = [beat for beat in self._heartbeats.values() if now - beat.time < HEARTBEAT_TIMEOUT_S]
        gateways_are_known = bool(recent) or now - self._started >= HEARTBEAT_TIMEOUT_S
        known = gateways_are_known and all(beat.version == self._version for beat in recent)
        live = sum(beat.live.get(name, 0) for beat in recent)
        return EnsembleStatus(
            ensemble=entry.ensemble,
            state=entry.state,
            live=live,
            known=known,
            drained=entry.state == "draining" and known and not live,
        )

    def _named(self, name: str) -> EnsembleEntry:
        for entry in self._entries.values():
            if name in entry.ensemble.names:
                return entry
        names = ", ".join(self._entries) or "none"
        raise EnsemblesError(f"ensembles.{name}: no such ensemble; this service has: {names}")

    def _put(self, entry: EnsembleEntry) -> None:
        if self._entries.get(entry.ensemble.name) != entry:
            self._entries[entry.ensemble.name] = entry
            self._change()

    def _change(self) -> None:
        self._version += 1
