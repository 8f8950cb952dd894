"""Runs a service in the foreground of a command, which stops on a signal."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING

from privmix_cluster.console import Steps

if TYPE_CHECKING:
    from privmix_cluster.configuration import Configuration
    from privmix_cluster.launch import Service


@contextmanager
def serving(configuration: "Configuration", steps: Steps, address: str | None = None) -> "Iterator[Service]":
    """Serves until the block ends, on the Ray cluster at `address` or else as `ray_session.connected` says."""
    from privmix.foundation.ray_session import connected
    from privmix.gateway.front_door import prepared

    steps("Starting Ray")
    with prepared(), connected(address):
        from privmix_cluster.launch import launch  # takes seconds

        service = launch(configuration, steps)
        try:
            yield service
        finally:
            steps("Stopping; unused budget returns to the ledger")
            service.stop()


def wait_for_signal() -> None:
    """Waits for Ctrl-C or SIGTERM."""
    stopped = Event()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    stopped.wait()
