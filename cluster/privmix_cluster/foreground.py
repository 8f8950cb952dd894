"""Runs a service in the foreground of a command: it starts while other work goes on, and stops on a signal."""

import signal
from collections.abc import Callable
from importlib import import_module
from threading import Event, Thread
from types import FrameType
from typing import TYPE_CHECKING

from privmix.foundation.lazily import quick_imports
from privmix_cluster.steps import Steps

if TYPE_CHECKING:
    from privmix_cluster.checks import Report
    from privmix_cluster.configuration import Configuration
    from privmix_cluster.launch import Service


def import_meanwhile() -> None:
    """Imports in a thread what a launch needs, while Ray's processes start.

    Nothing of Ray's: `ray.init` imports that itself, and two threads that import one package in two orders may see a
    half of it.
    """
    Thread(target=lambda: [import_module(name) for name in ("dp_accounting", "fastapi")], daemon=True).start()


def import_launch() -> "Callable[[Configuration, Report], Service]":
    """Returns `launch.launch`. Ray Serve imports pandas for answers of its types, which no service here has."""
    with quick_imports({"pandas": None}):
        from privmix_cluster.launch import launch
    return launch


def wait_for_signal() -> None:
    """Waits for Ctrl-C or SIGTERM."""
    stopped = Event()

    def handle(_signal: int, _frame: FrameType | None) -> None:
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    stopped.wait()


def stop(service: "Service", steps: Steps) -> None:
    """Stops a service and reports the step."""
    steps("Stopping; unused budget returns to the ledger")
    service.stop()
