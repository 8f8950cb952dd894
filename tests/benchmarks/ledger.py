"""Measures the ledger's throughput: `python -m tests.benchmarks.ledger --json`.

For SQLite and PostgreSQL, both on this machine's disk with durability on:

- `tokens_per_s`: charged tokens per second in leases of `SIZE`, each charged and settled, by the number of concurrent
  holders. `grouped` is the ratio of many holders to one, the gain of shared commits.
- `commit_ms`: time of one lease of one holder, including the durable commit.
"""

import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from privmix.budget.ledger import Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.privacy.protocols.pmixed import RatioEvent
from privmix_cluster.options import JsonOption
from tests import postgresql
from tests.benchmarks.options import show

EVENT = RatioEvent(parts=80, q=0.03, radius=0.2)
BUDGET = PrivacyBudget(ensemble="benchmark", epsilon=1e9, delta=1e-5, order=8.0, adjacency="user")
SIZE = 32
HOLDERS = 32


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Half a second each.")] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="Time of each measurement.")] = 10.0,
    as_json: JsonOption = False,
) -> None:
    """Measures charged tokens per second."""
    with databases() as places:
        show({name: throughput(place, 0.5 if quick else seconds) for name, place in places.items()}, as_json)


@contextmanager
def databases() -> Iterator[dict[str, str]]:
    """Yields a place for a ledger in each database."""
    with tempfile.TemporaryDirectory(prefix="ledger-") as folder, postgresql.running() as server:
        yield {"sqlite": f"{folder}/ledger.db", "postgresql": server.database()}


def throughput(place: str, seconds: float) -> dict[str, Any]:
    """Measures charged tokens per second, by the number of holders."""
    ledger = Ledger.create(place, BUDGET)
    rates = {holders: leases_per_s(ledger, holders, seconds) for holders in (1, HOLDERS)}
    return {
        "tokens_per_s": {f"{holders} holders": round(SIZE * rate) for holders, rate in rates.items()},
        "grouped": round(rates[HOLDERS] / rates[1], 1),
        "commit_ms": round(500 / rates[1], 2),  # a lease and its settlement are two commits
    }


def leases_per_s(ledger: Ledger, holders: int, seconds: float) -> float:
    """Measures charged and settled leases per second."""
    before, deadline = ledger.balance().charged.get(EVENT, 0), time.monotonic() + seconds

    def hold() -> None:
        while time.monotonic() < deadline:
            ledger.settle(ledger.lease(EVENT, SIZE).lease, SIZE)

    threads = [threading.Thread(target=hold) for _ in range(holders)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (ledger.balance().charged[EVENT] - before) / SIZE / (time.monotonic() - began)


if __name__ == "__main__":
    typer.run(main)
