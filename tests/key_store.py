"""Applies one operation of a request at a time. The keys actor applies those of many requests together."""

from collections.abc import Sequence
from typing import Any

from privmix.keys.records import Key
from privmix.keys.store import KeyStore
from privmix.keys.transactions import (
    Exhausted,
    Find,
    OpenReservation,
    Operation,
    Reserve,
    Reserved,
    Settle,
    Wait,
)


class RequestStore(KeyStore):
    def find(self, hash_: str) -> Key | None:
        return self._only(Find(hash_))

    def reserve(
        self, id_: str, subjects: Sequence[str], wanted: int, generations: int, gateway: str
    ) -> Reserved | Wait | Exhausted:
        return self._only(Reserve(id_, tuple(subjects), wanted, generations, gateway))

    def settle(self, id_: str, used: int | None) -> OpenReservation | None:
        return self._only(Settle(id_, used))

    def _only(self, operation: Operation) -> Any:
        return self.transact([operation])[0]
