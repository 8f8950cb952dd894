"""The functions that test processes run. Their first argument is the connection to the test."""

import os
import random
import resource
import time
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path

from privmix.budget.ledger import Grant, Ledger
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.budget.reading import read
from privmix.budget.receipt import anchors_of, begin
from privmix.foundation.errors import LedgerError, LedgerUnavailable
from tests.services.budget.events import COARSE, EVENTS

NOBODY = 65534

# What a creation and the first lease import. A process that is killed after milliseconds, or that may no longer read
# the files, has them.
for needed in ("scipy.special", "dp_accounting.rdp"):
    import_module(needed)


def lease_forever(connection: Connection, place: str | Path, terms: PrivacyBudget, seed: int) -> None:
    """Leases and settles in a loop, and reports every grant to the test at once, and each outage of the ledger."""
    ledger, choice = Ledger.create(place, terms), random.Random(seed)
    connection.send(("open", ledger.balance().epoch))
    while True:
        try:
            _lease_once(connection, ledger, choice)
        except LedgerUnavailable:
            connection.send(("interrupted",))
            time.sleep(0.05)


def _lease_once(connection: Connection, ledger: Ledger, choice: random.Random) -> None:
    charged = choice.choice(EVENTS)
    grant = ledger.lease(charged, choice.randint(1, 3))
    connection.send(("lease", grant.lease, charged, grant.count))
    if grant.count and choice.random() < 0.5:
        used = choice.randint(0, grant.count)
        connection.send(("settling", grant.lease, used))
        ledger.settle(grant.lease, used)
        connection.send(("settled", grant.lease, used))


def open_once(connection: Connection, place: str | Path, terms: PrivacyBudget) -> None:
    connection.send(Ledger.create(place, terms).balance().epoch)


def meet_a_full_disk(connection: Connection, path: Path, terms: PrivacyBudget) -> None:
    """Leases while the system refuses writes beyond 1,000 bytes of a file, and again after that."""
    ledger = Ledger.create(path, terms)
    _, ceiling = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, ceiling))
    try:
        refused: Grant | LedgerError = ledger.lease(COARSE, 5)
    except LedgerError as error:
        refused = error
    resource.setrlimit(resource.RLIMIT_FSIZE, (ceiling, ceiling))
    connection.send((refused, ledger.lease(COARSE, 7).count))


def meet_a_read_only_place(connection: Connection, path: Path, terms: PrivacyBudget) -> None:
    """Opens a ledger whose directory and file are read-only for this process."""
    path.chmod(0o444)
    path.parent.chmod(0o555)
    if os.geteuid() == 0:
        os.setuid(NOBODY)
    try:
        opened: Ledger | LedgerError = Ledger.create(path, terms)
    except LedgerError as error:
        opened = error
    connection.send((opened, read(path)))


def meet_a_read_only_ensemble(connection: Connection, place: str, terms: PrivacyBudget, ensemble: Path) -> None:
    """Leases while the ensemble's directory is writable, read-only and writable again, with one writer and a new one.

    Sends the error of a beginning in a read-only directory, then the granted numbers and the errors, in this order, and
    what the writers' health checks said.
    """
    if os.geteuid() == 0:
        os.setuid(NOBODY)
    told: list[int | LedgerError | None] = []
    ensemble.chmod(0o555)
    try:
        begin(place, terms, ensemble)
    except LedgerError as error:
        assert not Path(place).exists() and not list(ensemble.iterdir())
        told.append(error)
    ensemble.chmod(0o777)
    begin(place, terms, ensemble)
    ledger = Ledger.open(place, terms, anchors=anchors_of(ensemble), holder="one")
    for mode in (0o777, 0o555, 0o777):
        ensemble.chmod(mode)
        successor = Ledger.open(place, terms, anchors=anchors_of(ensemble), holder="one")
        for writer in (ledger, ledger, successor):
            for ask in (lambda writer=writer: writer.lease(COARSE, 2).count, writer.check):
                try:
                    told.append(ask())
                except LedgerError as error:
                    told.append(error)
        ledger = Ledger.open(place, terms, anchors=anchors_of(ensemble), holder="one")
    connection.send(told)
