"""Reads what a ledger and the database of its keys have charged."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from privmix.budget.reading import read
from privmix.budget.statement import statement
from privmix.keys.records import Key
from tests.key_store import RequestStore


@dataclass(frozen=True)
class Charges:
    """What a ledger and the keys' database have charged.

    Attributes:
        tokens: the tokens charged in the ledger, open leases included.
        parts: the numbers of parts that tokens were drawn from.
        epsilon, promised: the epsilon of all charged tokens, and that of the budget.
        by_key: the tokens charged to each key's share, by the key's name, running requests included.
    """

    tokens: int
    parts: frozenset[int] = frozenset()
    epsilon: float | None = 0.0
    promised: float | None = 1.0
    by_key: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, ledger: str | Path, store: RequestStore | None = None, keys: Mapping[str, Key] | None = None
    ) -> "Charges":
        """Reads the charges, for a service with keys also those of its keys, by name."""
        balance, accounts = read(ledger), [] if store is None else store.accounts()
        charged = {account.key.id: account.usage.charged for account in accounts}
        return cls(
            tokens=sum(balance.charged.values()),
            parts=frozenset(event.parts for event in balance.charged),  # type: ignore[attr-defined]
            epsilon=statement(balance).epsilon_bound,
            promised=balance.terms.epsilon,
            by_key={name: charged.get(key.id, 0) for name, key in (keys or {}).items()},
        )
