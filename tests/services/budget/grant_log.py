"""Records the grants that processes report, and compares them with the ledger."""

from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

from privmix.budget.state import Balance
from privmix.privacy.events import Event


class GrantLog:
    """The messages of processes before they, or their database, were killed."""

    def __init__(self) -> None:
        self.epoch = 0
        self.interruptions = 0
        self.granted: dict[str, tuple[Event, int]] = {}
        self.settling: dict[str, int] = {}
        self.settled: dict[str, int] = {}

    def record_pending(self, connection: Connection) -> None:
        """Records the messages that have arrived."""
        while connection.poll():
            self.record(connection.recv())

    def record_all(self, connection: Connection) -> None:
        """Records messages until the process closes the connection."""
        try:
            while True:
                self.record(connection.recv())
        except EOFError:
            pass

    def record(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("interrupted",):
                self.interruptions += 1
            case "open", epoch:
                assert epoch == self.epoch + 1
                self.epoch = epoch
            case "lease", lease, event, count:
                assert lease not in self.granted
                self.granted[lease] = event, count
            case "settling", lease, used:
                self.settling[lease] = used
            case "settled", lease, used:
                self.settled[lease] = used

    def check(self, balance: Balance) -> None:
        """Checks that the ledger charges all granted tokens, except tokens that a settlement returned."""
        at_least, at_most = Counter[Event](), Counter[Event]()
        for lease, (event, count) in self.granted.items():
            at_least[event] += self.settled.get(lease, self.settling.get(lease, count))
            at_most[event] += self.settled.get(lease, count)
        for event in at_most:
            # In every epoch and at every interruption, one lease of up to 3 tokens may be on disk but not reported.
            unreported = 3 * (self.epoch + self.interruptions)
            assert at_least[event] <= balance.charged[event] <= at_most[event] + unreported
