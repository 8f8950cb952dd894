"""Measures the ledger's throughput and the start of a long ledger: `python -m tests.benchmarks.ledger --json`.

For SQLite and PostgreSQL, both on this machine's disk with durability on:

- `tokens_per_s`: charged tokens per second, each lease charged and settled, by lease size and number of concurrent
  holders. `grouped` is the ratio of many holders to one, the gain of shared commits.
- `accounts_tokens_per_s`: the same for individual budgets with the accounts of 64 parts, in leases of 32 tokens.
- `commit_ms`: time of one lease of one holder, including the durable commit.
- `start_s`: time to open a ledger of `rows` rows for writing; `rows_per_s_verified`: speed of a full verification.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer
from rich.console import Console
from rich.progress import track

from privmix.budget.ledger import Ledger, applied
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reader import replay
from privmix.budget.records import Leased, Record, Settled
from privmix.budget.store.database import LedgerDatabase
from privmix.budget.store.rows import append
from privmix.budget.verification import verify
from privmix.privacy.protocols.individual import HEADROOM, IndividualSettings
from privmix.privacy.protocols.pmixed import RatioEvent
from privmix_cluster.options import JsonOption
from tests import postgresql
from tests.benchmarks.options import show

EVENT = RatioEvent(parts=80, q=0.03, radius=0.2)
BUDGET = PrivacyBudget(ensemble="benchmark", epsilon=1e9, delta=1e-5, order=8.0, adjacency="user")
SIZES = 32, 256
HOLDERS = 32
BATCH = 5_000
PARTS = 64
ACCOUNTS = IndividualSettings(tokens=10**9)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="2,000 rows and half a second each.")] = False,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the long ledger.")] = 5_000_000,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time of each measurement of throughput.")] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Measures charged tokens per second and the start of a long ledger."""
    rows, seconds = (2000, 0.5) if quick else (rows, seconds)
    measured = {}
    with databases() as places:
        for name, (busy, accounts, long) in places.items():
            measured[name] = {
                **throughput(busy, seconds),
                "accounts_tokens_per_s": with_accounts(accounts, seconds),
                **start(long, rows, name),
            }
    show(measured, as_json)


@contextmanager
def databases() -> Iterator[dict[str, tuple[str, str, str]]]:
    """Yields three places for ledgers in each database."""
    folder = Path(tempfile.mkdtemp(prefix="ledger-"))
    try:
        with postgresql.running() as server:
            yield {
                "sqlite": (str(folder / "busy.db"), str(folder / "accounts.db"), str(folder / "long.db")),
                "postgresql": (server.database(), server.database(), server.database()),
            }
    finally:
        shutil.rmtree(folder)


def throughput(place: str, seconds: float) -> dict[str, Any]:
    """Measures charged tokens per second, by lease size and number of holders."""
    ledger = Ledger.create(place, BUDGET)
    rates = {
        size: {holders: leases_per_s(ledger, size, holders, seconds) for holders in (1, HOLDERS)} for size in SIZES
    }
    return {
        "tokens_per_s": {
            f"leases of {size}, {count} holders": round(size * rate)
            for size, by_holders in rates.items()
            for count, rate in by_holders.items()
        },
        "grouped": round(rates[SIZES[0]][HOLDERS] / rates[SIZES[0]][1], 1),
        "commit_ms": round(500 / rates[SIZES[0]][1], 2),  # a lease and its settlement are two commits
    }


def with_accounts(place: str, seconds: float) -> dict[str, int]:
    """Measures charged tokens per second with accounts, by number of holders."""
    protocol = ACCOUNTS.plan(PARTS)
    ledger = Ledger.create(place, PrivacyBudget.of("benchmark", ACCOUNTS, protocol))
    rates = {}
    for holders in (1, HOLDERS):
        before, deadline = ledger.balance().charged.get(protocol.event, 0), time.monotonic() + seconds

        def hold(deadline: float = deadline) -> None:
            while time.monotonic() < deadline:
                grant = ledger.lease(protocol.event, SIZES[0], None, PARTS)
                charges = tuple(grant.count * allowance // HEADROOM for allowance in grant.allowances)
                ledger.settle(grant.lease, grant.count, charges)

        elapsed = concurrently(hold, holders)
        rates[f"{holders} holders"] = round((ledger.balance().charged[protocol.event] - before) / elapsed)
    return rates


def concurrently(hold: Callable[[], None], holders: int) -> float:
    """Runs a function in several threads; returns the seconds until all have ended."""
    threads = [threading.Thread(target=hold) for _ in range(holders)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - began


def leases_per_s(ledger: Ledger, size: int, holders: int, seconds: float) -> float:
    """Measures charged and settled leases per second."""
    before, deadline = ledger.balance().charged.get(EVENT, 0), time.monotonic() + seconds

    def hold() -> None:
        while time.monotonic() < deadline:
            ledger.settle(ledger.lease(EVENT, size).lease, size)

    elapsed = concurrently(hold, holders)
    return (ledger.balance().charged[EVENT] - before) / size / elapsed


def start(place: str, rows: int, name: str) -> dict[str, Any]:
    """Measures the time to open and to verify a ledger of ``rows`` rows."""
    ledger = Ledger.create(place, BUDGET)
    lengthen(place, rows, f"Writing {rows:,} rows to {name}")
    del ledger
    began = time.monotonic()
    opened = Ledger.create(place, BUDGET)
    start_s = time.monotonic() - began
    assert opened.balance().rows >= rows
    began = time.monotonic()
    assert verify(place).charged == opened.balance().charged
    return {
        "rows": opened.balance().rows,
        "start_s": round(start_s, 2),
        "rows_per_s_verified": round(rows / (time.monotonic() - began)),
    }


def lengthen(place: str, rows: int, title: str) -> None:
    """Appends rows of leases and settlements like a writer, in few transactions."""
    database = LedgerDatabase(place, "write")
    with database.transaction() as connection:
        state = replay(connection)
    fields = EVENT.as_dict()
    for _ in track(range(0, rows, BATCH), title, console=Console(stderr=True)):
        records: list[Record] = []
        for _ in range(BATCH // 2):
            name = uuid4().hex
            records += [Leased(lease=name, event=fields, count=32), Settled(lease=name, used=31)]
        with database.transaction() as connection:
            append(connection, applied(state, records))


if __name__ == "__main__":
    typer.run(main)
