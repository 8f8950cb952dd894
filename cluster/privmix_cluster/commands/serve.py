"""Implements `privmix serve`, which runs the service in the foreground until a signal stops it."""

from pathlib import Path
from typing import Annotated

import typer

from privmix_cluster.foreground import import_launch, import_meanwhile, stop, wait_for_signal
from privmix_cluster.steps import Steps


def serve(
    config: Annotated[Path, typer.Option(help="The YAML file; cluster/privmix.yaml is a commented example.")],
    address: Annotated[str | None, typer.Option(help="The Ray cluster to join. Default: start a local one.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only check that a start would succeed.")] = False,
) -> None:
    """Serve an ensemble over HTTP until Ctrl-C or SIGTERM."""
    from privmix.foundation.ray_session import connected
    from privmix_cluster.configuration import Configuration

    configuration = Configuration.load(config)
    if check:
        from privmix_cluster.checks import check_service

        check_service(configuration)
        return
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
