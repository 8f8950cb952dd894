"""Does the work of one request at a time on the keys' database. The keys actor does that of many requests together."""

from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection

from privmix.keys import reservations, store
from privmix.keys.records import Key, KeyAccount
from privmix.keys.reservations import Exhausted
from privmix.keys.store import KeyStore

T = TypeVar("T")


class RequestStore(KeyStore):
    def account(self, id_or_name: str) -> KeyAccount:
        key = self._do(lambda connection: store._named(connection, id_or_name))
        return next(account for account in self.accounts() if account.key.id == key.id)

    def find(self, hash_: str) -> Key | None:
        return self._do(lambda connection: reservations.find(connection, hash_))

    def reserve(self, id_: str, key: str, wanted: int, generations: int, gateway: str) -> int | Exhausted:
        return self._do(lambda connection: reservations.reserve(connection, id_, key, wanted, generations, gateway))

    def settle(self, id_: str, used: int | None) -> None:
        self._do(lambda connection: reservations.settle(connection, id_, used))

    def spent_ratios(self) -> dict[str, float]:
        return self._do(reservations.spent_ratios)

    def _do(self, work: Callable[[Connection], T]) -> T:
        with self._database.transaction() as connection:
            return work(connection)
