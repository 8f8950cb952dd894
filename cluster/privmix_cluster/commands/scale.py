"""Implements `privmix scale`, which changes the number of shards of a running service."""

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from privmix_cluster.options import NAMESPACE, RUNNING, AddressOption, JsonOption, NamespaceOption

if TYPE_CHECKING:
    from privmix.fleet.shard_map import ShardMap


def scale(
    shards: Annotated[int, typer.Option(min=1, help="The new number of shards.")],
    address: AddressOption = RUNNING,
    namespace: NamespaceOption = NAMESPACE,
    as_json: JsonOption = False,
) -> None:
    """Add the next parts of the ensemble to the service, or remove the last ones. Running streams continue.

    The number of parts N changes the cost of a token: `privmix plan --parts N` shows it in advance, /v1/privacy shows
    it afterwards.
    """
    import ray

    from privmix.foundation.ray_session import joined
    from privmix_cluster.named_actors import fleet_of

    with joined(address):
        shard_map: ShardMap = ray.get(fleet_of(namespace).scale.remote(shards))
    if as_json:
        event = shard_map.protocol.event.as_dict()
        print(
            json.dumps({"shards": len(shard_map.groups), "parts": shard_map.protocol.parts, "event": event}, indent=2)
        )
    else:
        Console().print(f"{len(shard_map.groups)} shards serve {shard_map.protocol.parts} parts")
