"""Implements `privmix serve`, which runs the service in the foreground until a signal stops it."""

from pathlib import Path
from typing import Annotated

import typer

from privmix_cluster.console import Steps
from privmix_cluster.foreground import serving, wait_for_signal


def serve(
    config: Annotated[Path, typer.Option(help="The YAML file; cluster/privmix.yaml is a commented example.")],
    address: Annotated[str | None, typer.Option(help="The Ray cluster to join. Default: start a local one.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only check that a start would succeed.")] = False,
) -> None:
    """Serve an ensemble over HTTP until Ctrl-C or SIGTERM."""
    from privmix_cluster.configuration import Configuration

    configuration = Configuration.load(config)
    if check:
        from privmix_cluster.checks import check_ensemble, check_keys

        check_keys(configuration, listens=False)
        check_ensemble(configuration)
        return
    steps = Steps()
    with serving(configuration, steps, address) as service:
        steps(f"Serving on {service.url}/v1; stop with Ctrl-C")
        wait_for_signal()
