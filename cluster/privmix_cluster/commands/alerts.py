"""Implements `privmix alerts`, which tests the webhooks."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from privmix_cluster.options import JsonOption

if TYPE_CHECKING:
    from privmix_cluster.configuration import Configuration

alerts = typer.Typer(
    name="alerts", help="Webhooks that receive alerts about the budget and about failures.", no_args_is_help=True
)


@alerts.callback()
def group() -> None:
    """Makes `test` a subcommand although it is the only one."""


@alerts.command("test")
def send_test(
    config: Annotated[Path, typer.Option(help="The configuration file.")] = Path("privmix.yaml"),
    as_json: JsonOption = False,
) -> None:
    """Send a test alert to every webhook of the configuration; exit with 1 if one does not accept it."""
    import httpx

    from privmix_cluster.configuration import Configuration

    configuration = Configuration.load(config)
    failures = asyncio.run(_send(configuration))
    hosts = [httpx.URL(url.get_secret_value()).host for url in configuration.alerts.webhooks]
    if as_json:
        webhooks = [{"host": host, "failure": failure} for host, failure in zip(hosts, failures, strict=True)]
        print(json.dumps({"webhooks": webhooks}, indent=2))
    else:
        for host, failure in zip(hosts, failures, strict=True):
            print(f"{host}: {failure or 'delivered'}")
        if not hosts:
            print("alerts.webhooks: is empty; add a URL")
    if any(failures) or not hosts:
        raise typer.Exit(1)


async def _send(configuration: "Configuration") -> list[str | None]:
    """Sends the alert. Returns for each webhook None, or the reason why it did not accept the alert."""
    import httpx

    from privmix.alerts.alert import Alert
    from privmix.alerts.webhook import post

    ensemble = configuration.http.served_model_names[0]
    text = f"A test: {ensemble} can reach this webhook."
    alert = Alert(event="test", ensemble=ensemble, namespace=configuration.namespace, text=text)
    settings = configuration.alerts
    async with httpx.AsyncClient() as client:
        posts = (post(client, url, alert.id, alert.body(), settings.secret) for url in settings.webhooks)
        return [None if failure is None else failure.reason for failure in await asyncio.gather(*posts)]
