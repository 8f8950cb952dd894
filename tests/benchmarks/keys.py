"""Measures how many requests with keys the keys actor admits and settles: `python -m tests.benchmarks.keys --json`.

For SQLite and PostgreSQL, both on this machine's disk with durability on, with `--keys` keys in groups of ten. Each key
has its own share and that of its group:

- `requests_per_s`: requests per second, each identified, admitted and settled, with `--clients` concurrent ones.
- `cpu_ms_per_request`: processor time of this process, which does not depend on the machine's other work.
- `statements_per_request`, `transactions_per_request`: statements and transactions in that run, per request.
- `exact`: whether the shares were charged exactly the tokens that the requests used.
- `accounts_ms`, `accounts_statements`: one reading of all accounts, as every 5 s for the metrics.
- `consoles_each_ms`, `consoles_shared_ms`, `consoles_ratio`: the accounts for `CONSOLES` open consoles in one second,
  where each reads them all and where they share a reading; side by side in this run.

The target is 1,000 requests per second on SQLite.
"""

import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from sqlalchemy import event

from privmix.gateway.console import SHARES_S
from privmix.keys.actor import Keys
from privmix.keys.messages import AdmissionLimits, Admitted, Identity
from privmix.keys.records import Secret, Share
from privmix_cluster.options import JsonOption
from tests import postgresql
from tests.benchmarks.options import show

LIMITS = AdmissionLimits(capacity=512, max_waiting=4096)
TOKENS = 32
TARGET = 1000.0
CONSOLES = 10


def main(
    keys: Annotated[int, typer.Option(min=1, help="The number of keys.")] = 1000,
    requests: Annotated[int, typer.Option(min=1, help="The number of requests.")] = 5000,
    clients: Annotated[int, typer.Option(min=1, help="The number of concurrent clients.")] = 128,
    quick: Annotated[bool, typer.Option("--quick", help="10 keys and 50 requests.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measure the requests with keys per second, and the statements that they need."""
    keys, requests, clients = (10, 50, 8) if quick else (keys, requests, clients)
    with tempfile.TemporaryDirectory() as folder:
        measured = {"sqlite": asyncio.run(measure(str(Path(folder) / "keys.db"), keys, requests, clients))}
    with postgresql.running() as server:
        measured["postgresql"] = asyncio.run(measure(server.database(), keys, requests, clients))
    measured["sqlite"]["target_met"] = measured["sqlite"]["requests_per_s"] >= TARGET
    show(measured, as_json)


async def measure(place: str, keys: int, requests: int, clients: int) -> dict[str, Any]:
    """Measures one database."""
    actor = Keys(place)
    store = actor._store
    secrets = [
        store.create(f"key-{number}", group=f"group-{number // 10}", share=Share(tokens=10**9))[1]
        for number in range(keys)
    ]
    counts: Counter[str] = Counter()
    engine = store._database._database._engine
    event.listen(engine, "before_cursor_execute", lambda *_: counts.update(["statements"]))
    event.listen(engine, "commit", lambda _: counts.update(["transactions"]))
    numbers = iter(range(requests))
    used: Counter[str] = Counter()

    async def client() -> None:
        for number in numbers:
            secret: Secret = secrets[number * 7919 % keys]
            identity = await actor.identify(secret.hash)
            assert isinstance(identity, Identity)
            admitted = await actor.admit(f"{number}", identity.subjects, LIMITS, TOKENS, 1, "gateway")
            assert isinstance(admitted, Admitted)
            tokens = number % (TOKENS + 1)
            used[identity.name] += tokens
            await actor.settle(f"{number}", tokens)

    began, busy = time.monotonic(), time.process_time()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds, busy = time.monotonic() - began, time.process_time() - busy
    spent = dict(counts)
    counts.clear()
    began = time.monotonic()
    accounts = await actor.accounts()
    accounts_s, statements = time.monotonic() - began, counts["statements"]
    each_s = await _seconds_of_consoles(actor, 0.0)
    shared_s = await _seconds_of_consoles(actor, SHARES_S)
    charged = Counter({account.key.name: account.usage.spent for account in accounts})
    return {
        "requests_per_s": round(requests / seconds, 1),
        "cpu_ms_per_request": round(busy / requests * 1e3, 3),
        "statements_per_request": round(spent["statements"] / requests, 2),
        "transactions_per_request": round(spent["transactions"] / requests, 2),
        "exact": +charged == +used and not any(account.usage.held for account in accounts),
        "accounts_ms": round(accounts_s * 1e3, 1),
        "accounts_statements": statements,
        "consoles_each_ms": round(each_s * 1e3, 1),
        "consoles_shared_ms": round(shared_s * 1e3, 1),
        "consoles_ratio": round(each_s / shared_s, 1),
    }


async def _seconds_of_consoles(actor: Keys, age_s: float) -> float:
    await actor.accounts()
    began = time.monotonic()
    for _ in range(CONSOLES):
        await actor.accounts(age_s)
    return time.monotonic() - began


if __name__ == "__main__":
    typer.run(main)
