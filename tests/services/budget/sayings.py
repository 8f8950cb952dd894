"""What processes say that they were granted, held against the ledger."""

from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

from services.budget.state import Balance
from services.privacy.events import Event


class Sayings:
    """What processes told before they, or their database, were killed."""

    def __init__(self) -> None:
        self.epoch = 0
        self.interruptions = 0
        self.granted: dict[str, tuple[Event, int]] = {}
        self.settling: dict[str, int] = {}
        self.settled: dict[str, int] = {}

    def hear_waiting(self, connection: Connection) -> None:
        """What was told until now."""
        while connection.poll():
            self.hear(connection.recv())

    def hear_all(self, connection: Connection) -> None:
        try:
            while True:
                self.hear(connection.recv())
        except EOFError:
            pass

    def hear(self, message: tuple[Any, ...]) -> None:
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
        """Everything granted is charged, but for what was returned; nothing was returned that was not offered."""
        at_least, at_most = Counter[Event](), Counter[Event]()
        for lease, (event, count) in self.granted.items():
            at_least[event] += self.settled.get(lease, self.settling.get(lease, count))
            at_most[event] += self.settled.get(lease, count)
        for event in at_most:
            # One lease of up to 3 tokens may have reached the disk untold in every epoch and at every interruption.
            untold = 3 * (self.epoch + self.interruptions)
            assert at_least[event] <= balance.charged[event] <= at_most[event] + untold
