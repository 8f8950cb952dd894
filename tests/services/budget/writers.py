"""What the processes of these tests do. Each takes the connection to the test first."""

import os
import random
import resource
import time
from multiprocessing.connection import Connection
from pathlib import Path

from sqlalchemy import Connection as DatabaseConnection
from sqlalchemy import Engine, event

from services.budget.errors import LedgerError, LedgerUnavailable
from services.budget.ledger import Grant, Ledger
from services.budget.move import move
from services.budget.privacy_budget import PrivacyBudget
from services.budget.reader import read
from services.budget.receipt import Begun, begin
from tests.services.budget.events import COARSE, EVENTS

NOBODY = 65534


def scribble(connection: Connection, place: str | Path, terms: PrivacyBudget, seed: int) -> None:
    """Leases and settles for ever; tells the test what it was told, as soon as it was told."""
    ledger, choice = Ledger(place, terms), random.Random(seed)
    connection.send(("open", ledger.balance().epoch))
    while True:
        _scribble_once(connection, ledger, choice)


def scribble_on(connection: Connection, place: str | Path, terms: PrivacyBudget, seed: int) -> None:
    """The same, and where the ledger cannot be had it says so and tries again."""
    ledger, choice = Ledger(place, terms), random.Random(seed)
    connection.send(("open", ledger.balance().epoch))
    while True:
        try:
            _scribble_once(connection, ledger, choice)
        except LedgerUnavailable:
            connection.send(("interrupted",))
            time.sleep(0.05)


def _scribble_once(connection: Connection, ledger: Ledger, choice: random.Random) -> None:
    charged = choice.choice(EVENTS)
    grant = ledger.lease(charged, choice.randint(1, 3))
    connection.send(("lease", grant.lease, charged, grant.count))
    if grant.count and choice.random() < 0.5:
        used = choice.randint(0, grant.count)
        connection.send(("settling", grant.lease, used))
        ledger.settle(grant.lease, used)
        connection.send(("settled", grant.lease, used))


def lease_on_demand(connection: Connection, place: str | Path, terms: PrivacyBudget) -> None:
    """Opens the ledger, then answers every number with the tokens granted or the name of the error."""
    ledger = Ledger(place, terms)
    connection.send("open")
    while wanted := connection.recv():
        try:
            connection.send(ledger.lease(COARSE, wanted).count)
        except LedgerError as error:
            connection.send(type(error).__name__)


def open_once(connection: Connection, place: str | Path, terms: PrivacyBudget) -> None:
    connection.send(Ledger(place, terms).balance().epoch)


def lose_a_confirmation(connection: Connection, path: Path, terms: PrivacyBudget) -> None:
    """A commit that reaches the disk while its writer does not learn of it; then the writer goes on."""
    ledger = Ledger(path, terms)
    if (child := os.fork()) == 0:
        ledger.lease(COARSE, 5, "unconfirmed")
        os._exit(0)
    os.waitpid(child, 0)
    unaware = sum(ledger.balance().charged.values())
    again = ledger.lease(COARSE, 5, "unconfirmed").count
    connection.send((unaware, again, ledger.lease(COARSE, 7).count, ledger.balance()))


def meet_a_full_disk(connection: Connection, path: Path, terms: PrivacyBudget) -> None:
    """The system refuses every write beyond 1,000 bytes of a file, then lets them pass again."""
    ledger = Ledger(path, terms)
    _, ceiling = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, ceiling))
    try:
        refused: Grant | LedgerError = ledger.lease(COARSE, 5)
    except LedgerError as error:
        refused = error
    resource.setrlimit(resource.RLIMIT_FSIZE, (ceiling, ceiling))
    connection.send((refused, ledger.lease(COARSE, 7).count))


def meet_a_read_only_place(connection: Connection, path: Path, terms: PrivacyBudget) -> None:
    """Directory and file may be read and not written by this process."""
    path.chmod(0o444)
    path.parent.chmod(0o555)
    if os.geteuid() == 0:
        os.setuid(NOBODY)
    try:
        opened: Ledger | LedgerError = Ledger(path, terms)
    except LedgerError as error:
        opened = error
    connection.send((opened, read(path)))


def begin_in_a_read_only_directory(connection: Connection, place: str, terms: PrivacyBudget, ensemble: Path) -> None:
    """The ensemble's directory may be read and not written by this process."""
    ensemble.chmod(0o555)
    if os.geteuid() == 0:
        os.setuid(NOBODY)
    try:
        begun: Begun | LedgerError = begin(place, terms, ensemble)
    except LedgerError as error:
        begun = error
    connection.send(begun)


def die_before_commit(connection: Connection, number: int, source: str, target: str) -> None:
    """Moves a ledger, and ends without a trace where the commit of that number (from 1) would begin."""
    left = iter(range(number - 1))

    def count_down(_: DatabaseConnection) -> None:
        if next(left, None) is None:
            os._exit(0)

    event.listen(Engine, "commit", count_down)
    move(source, target)
    connection.send("moved")
