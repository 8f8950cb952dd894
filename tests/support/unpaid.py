"""Looks for tokens that are sampled and that nobody pays for.

A client that leaves while the coordinator holds a sampled token back may have seen it already: in the state of a
grammar that it uses again, or in the time until the next position. So each sampled token must be charged to the
ledger, to the accounts of the parts and to the key's share. This attack leaves at every point of an answer, which are
the turns of the coordinator's event loop, in each way that a client has, and counts samples and charges.
"""

import asyncio
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from privmix.budget.accounts import Grains
from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.coordinator.coordinator import Coordinator
from privmix.coordinator.messages import Delta, Generation
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols.individual import IndividualSettings
from privmix.privacy.protocols.pmixed import PMixed
from privmix.structure import grammar
from privmix.training import public_model
from tests.support.offline import Samples, offline

PARTS, TOKENS = 2, 2
GRAMMAR = grammar.of_regex("[AB][a-z]{3}[0-9]{3}x")
MAX_TURNS = 2000

Way = Literal["cancels", "disconnects"]


@dataclass(frozen=True)
class Departure:
    """Holds what an answer has cost whose client left.

    Attributes:
        way: how the client left. The gateway cancels for a client; a gateway that is lost disconnects.
        turns: after how many turns of the event loop it left.
        sampled: the tokens that were sampled, and what they should charge to the accounts.
        charged: the tokens that the ledger charged, and what it charged to the accounts.
        reported: the tokens that the coordinator reports for the key's share; None if nobody can hear it.
        ended: whether the answer was complete before the client left.
    """

    way: Way
    turns: int
    sampled: tuple[int, Grains]
    charged: tuple[int, Grains]
    reported: int | None
    ended: bool

    @property
    def difference(self) -> str | None:
        """What does not agree, as a sentence; None if everything that was sampled is paid for."""
        (tokens, accounts), (paid, paid_accounts) = self.sampled, self.charged
        place = f"a client {self.way} at turn {self.turns}"
        if tokens != paid:
            return f"{place}: {tokens} tokens are sampled and {paid} charged"
        if any(accounts) and accounts != paid_accounts:
            return f"{place}: accounts are charged {paid_accounts} for tokens that cost {accounts}"
        if self.reported is not None and self.reported != tokens:
            return f"{place}: {tokens} tokens are sampled and the key pays for {self.reported}"
        return None


def departures(kind: type[Coordinator], protocol: Protocol, terms: PrivacyBudget, folder: Path) -> list[Departure]:
    """Leaves one answer after another, each one turn later, until an answer ends before. Writes a ledger to `folder`.

    Args:
        kind: the coordinator's class.
    """
    return asyncio.run(_departures(kind, protocol, terms, folder))


async def _departures(
    kind: type[Coordinator], protocol: Protocol, terms: PrivacyBudget, folder: Path
) -> list[Departure]:
    made = offline(kind, protocol, terms, folder / "ledger.db", public_model.resolve())
    found: list[Departure] = []
    ways: tuple[Way, ...] = ("cancels", "disconnects")
    for way in ways:
        for turns in range(MAX_TURNS):
            found.append(await _departure(*made, way, turns))
            if found[-1].ended:
                break
    return found


async def _departure(coordinator: Coordinator, samples: Samples, ledger: Ledger, way: Way, turns: int) -> Departure:
    name = f"{way}-{turns}"
    before = _charged(ledger)
    samples.tokens, samples.charges = 0, ()
    deltas: list[Delta] = []
    reading = asyncio.create_task(_read(coordinator, name, deltas))
    await coordinator.submit(name, [Generation(name, (504, 253), SamplingOptions(), TOKENS, grammar=GRAMMAR)])
    for _ in range(turns):
        await asyncio.sleep(0)
    ended = await coordinator.load() == 0
    if way == "cancels":
        await coordinator.cancel([name])
    else:
        reading.cancel()
    while coordinator._stepping is not None and not coordinator._stepping.done():
        await asyncio.sleep(0)
    await coordinator.return_leases()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    tokens, accounts = _charged(ledger)
    paid = tuple(map(int.__sub__, accounts, before[1] or (0,) * len(accounts)))
    reported = sum(delta.charged for delta in deltas) if way == "cancels" else None
    sampled = (samples.tokens, samples.charges)
    return Departure(way, turns, sampled, (tokens - before[0], paid), reported, ended)


async def _read(coordinator: Coordinator, channel: str, deltas: list[Delta]) -> None:
    async with aclosing(coordinator.events(channel)) as batches:  # type: ignore[type-var]
        async for batch in batches:
            deltas += batch


def _charged(ledger: Ledger) -> tuple[int, Grains]:
    balance = ledger.balance()
    return sum(balance.charged.values()) - sum(balance.held.values()), balance.accounts.charged


def unpaid(kind: type[Coordinator] = Coordinator) -> tuple[str, ...]:
    """Returns what the attack finds, as sentences: with raw rows, with shards that hold weights, and with accounts.

    Args:
        kind: the coordinator's class.
    """
    individual = IndividualSettings(epsilon=8.0, delta=1e-5, tokens=1024)
    planned = individual.plan(PARTS)
    terms = PrivacyBudget(ensemble="e", epsilon=1e3, delta=1e-5, order=4.0, adjacency="user")
    accounts = PrivacyBudget.of("e", individual, planned)
    worlds: Sequence[tuple[Protocol, PrivacyBudget]] = (
        (PMixed(PARTS, 1.0, mollifier="renyi", order=4, loss=0.1), terms),
        (PMixed(PARTS, 1.0, 0.4), terms),
        (planned, accounts),
    )
    sentences = []
    for protocol, paid_from in worlds:
        with TemporaryDirectory() as folder:
            found = departures(kind, protocol, paid_from, Path(folder))
        if max(left.sampled[0] for left in found) < TOKENS:
            sentences.append(f"{protocol.event.kind}: no answer was sampled to its end")
        sentences += [f"{protocol.event.kind}: {left.difference}" for left in found if left.difference is not None]
    return tuple(sentences)
