"""`privmix status`: which actors of a running service answer, and what they serve."""

import json
from importlib.metadata import version
from typing import Annotated, Any

import ray
import typer
from ray.exceptions import RayError
from rich.console import Console
from rich.table import Table

from cluster.running import fleet_of
from cluster.session import connected
from services.budget import actor as budget

PROBE_S = 10.0


def status(
    address: Annotated[str, typer.Option(help="The Ray cluster of the service.", envvar="RAY_ADDRESS")] = "auto",
    namespace: Annotated[str, typer.Option(help="The service's, as in its configuration.")] = "privmix",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show actors, shards, parts and versions of a running service; exit with 1 where one of them does not answer."""
    with connected(address):
        record = _record(namespace)
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        _show(record)
    if not all(actor["answers"] for actor in record["actors"]):
        raise typer.Exit(1)


def _record(namespace: str) -> dict[str, Any]:
    serving = ray.get(fleet_of(namespace).status.remote(), timeout=PROBE_S)
    others = {budget.NAME: "ready", **dict.fromkeys(serving["coordinators"], "event")}
    answering: list[dict[str, Any]] = [
        {"name": name, "answers": _answers(namespace, name, method), "parts": [], "resident_bytes": None}
        for name, method in others.items()
    ]
    return {
        "namespace": namespace,
        "parts": serving["parts"],
        "actors": [*answering, *serving["shards"]],
        "versions": {package: version(package) for package in ("privmix", "ray", "torch", "transformers")},
    }


def _answers(namespace: str, name: str, method: str) -> bool:
    try:
        ray.get(getattr(ray.get_actor(name, namespace), method).remote(), timeout=PROBE_S)
    except (RayError, ValueError, TimeoutError):
        return False
    return True


def _show(record: dict[str, Any]) -> None:
    versions = ", ".join(f"{package} {number}" for package, number in record["versions"].items())
    title = f"{record['namespace']}: {record['parts']} parts; {versions}"
    table = Table("actor", "parts", "answers", title=title, title_justify="left")
    table.add_column("MiB", justify="right")
    for actor in record["actors"]:
        parts = actor["parts"]
        size = "" if actor["resident_bytes"] is None else f"{actor['resident_bytes'] / 2**20:.0f}"
        shown = f"{parts[0]} to {parts[-1]}" if parts else ""
        table.add_row(actor["name"], shown, "yes" if actor["answers"] else "[red]no[/]", size)
    Console().print(table)
