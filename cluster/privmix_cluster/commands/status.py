"""Implements `privmix status`, which shows the actors of a running service and what they serve."""

import asyncio
import json
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import typer

from privmix_cluster.options import NAMESPACE, RUNNING, AddressOption, JsonOption, NamespaceOption
from privmix_cluster.tables import show_table

PROBE_S = 10.0


def status(
    address: AddressOption = RUNNING,
    namespace: NamespaceOption = NAMESPACE,
    as_json: JsonOption = False,
) -> None:
    """Show the actors, parts and versions of a running service; exit with 1 if an actor does not work."""
    from privmix.foundation.ray_session import joined

    with joined(address):
        record = _record(namespace)
    if as_json:
        print(json.dumps(record, indent=2))
    else:
        _show(record)
    if not all(actor["answers"] for actor in record["actors"]):
        raise typer.Exit(1)


def _record(namespace: str) -> dict[str, Any]:
    import ray

    from privmix_cluster.named_actors import fleet_of

    fleet_status = ray.get(fleet_of(namespace).status.remote(), timeout=PROBE_S)
    others = asyncio.run(_others(namespace, fleet_status["coordinators"]))
    return {
        "namespace": namespace,
        "parts": fleet_status["parts"],
        "actors": [*others, *fleet_status["shards"]],
        "versions": {package: version(package) for package in ("privmix", "ray", "torch", "transformers")},
    }


async def _others(namespace: str, coordinators: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the states of the budget actor and of all coordinators, with their problems."""
    from privmix.budget import actor as budget
    from privmix.gateway.status import Status

    statuses = [Status(namespace, (name,), PROBE_S, PROBE_S) for name in coordinators]
    troubles: dict[str, str] = {}
    for problems in await asyncio.gather(*(status.troubles() for status in statuses)):
        troubles |= problems
    return [
        {
            "name": name,
            "parts": [],
            "answers": name not in troubles,
            "resident_bytes": None,
            "trouble": troubles.get(name),
        }
        for name in (budget.NAME, *coordinators)
    ]


def _show(record: dict[str, Any]) -> None:
    versions = ", ".join(f"{package} {number}" for package, number in record["versions"].items())
    title = f"{record['namespace']}: {record['parts']} parts; {versions}"
    show_table(title, [_row(actor) for actor in record["actors"]])


def _row(actor: dict[str, Any]) -> dict[str, Any]:
    parts, size = actor["parts"], actor["resident_bytes"]
    return {
        "actor": actor["name"],
        "parts": f"{parts[0]} to {parts[-1]}" if parts else None,
        "works": "yes" if actor["answers"] else f"no: {actor['trouble']}",
        "MiB": None if size is None else round(size / 2**20),
    }
