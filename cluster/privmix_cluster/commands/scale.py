"""Implements `privmix scale`, which changes the numbers of shards and of their copies in a running service."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from privmix_cluster.options import NAMESPACE, RUNNING, AddressOption, JsonOption, NamespaceOption

if TYPE_CHECKING:
    from privmix.fleet.shard_map import ShardMap


def scale(
    shards: Annotated[int | None, typer.Option(min=1, help="The new number of shards.")] = None,
    copies: Annotated[int | None, typer.Option(min=1, help="The new number of copies of each shard.")] = None,
    address: AddressOption = RUNNING,
    namespace: NamespaceOption = NAMESPACE,
    as_json: JsonOption = False,
) -> None:
    """Add parts of the ensemble (shards) or throughput (copies), or remove some. Streams continue.

    The number of parts N changes the cost of a token: `privmix plan --parts N` shows it in advance, /v1/privacy shows
    it afterwards. Copies change neither.
    """
    import ray

    from privmix.foundation.ray_session import joined
    from privmix_cluster.named_actors import fleet_of

    with joined(address):
        shard_map: ShardMap = ray.get(fleet_of(namespace).scale.remote(shards, copies))
    size, protocol = shard_map.size, shard_map.protocol
    if as_json:
        print(json.dumps({**asdict(size), "parts": protocol.parts, "event": protocol.event.as_dict()}, indent=2))
    else:
        Console().print(f"{size} serve{'s' * (size.shards == 1)} {protocol.parts} parts")
