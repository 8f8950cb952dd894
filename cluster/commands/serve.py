"""Implements `privmix serve`, which runs the service in the foreground until a signal stops it."""

import signal
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from cluster.steps import Steps
from services.lazily import quick_imports

if TYPE_CHECKING:
    from cluster.configuration import Configuration
    from cluster.launch import Report, Service


def serve(
    config: Annotated[Path, typer.Option(help="The YAML file; cluster/privmix.yaml is a commented example.")],
    address: Annotated[str | None, typer.Option(help="The Ray cluster to join. Default: start a local one.")] = None,
) -> None:
    """Serve an ensemble over HTTP until Ctrl-C or SIGTERM."""
    from cluster.configuration import Configuration
    from services.ray_session import connected

    configuration = Configuration.load(config)
    steps = Steps()
    steps("Starting Ray")
    import_meanwhile()
    with connected(address):
        service = import_launch()(configuration, steps)
        try:
            steps(f"Serving on {service.url}/v1; stop with Ctrl-C")
            wait_for_signal()
        finally:
            stop(service, steps)


def import_meanwhile() -> None:
    """Imports in a thread what a launch needs, while Ray's processes start.

    Nothing of Ray's: `ray.init` imports that itself, and two threads that import one package in two orders may see a
    half of it.
    """
    Thread(target=lambda: [import_module(name) for name in ("dp_accounting", "fastapi")], daemon=True).start()


def import_launch() -> "Callable[[Configuration, Report], Service]":
    """Returns `cluster.launch.launch`. Ray Serve imports pandas for answers of its types, which no service here has."""
    with quick_imports({"pandas": None}):
        from cluster.launch import launch
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
