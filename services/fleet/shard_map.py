"""Which shards serve which models, and the protocol that follows from how many parts there are."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from services.privacy.protocol import Protocol


@dataclass(frozen=True)
class PartGroup:
    """Consecutive parts of the ensemble: their models, by number, with the names of their adapters.

    `shards` names the actors that serve them. Several are copies: they share the sequences, and no part counts twice.
    """

    index: int
    models: Mapping[int, str]
    shards: tuple[str, ...]


@dataclass(frozen=True)
class ShardMap:
    """Names the shards that serve each part, and the protocol for that number of parts. The highest version is valid.

    Raises:
        ValueError: two groups serve the same model, or the groups' models are not those that the protocol draws from.
    """

    version: int
    protocol: Protocol
    groups: tuple[PartGroup, ...]

    def __post_init__(self) -> None:
        served = sorted(model for group in self.groups for model in group.models)
        drawn = self.protocol.parts * (2 if self.protocol.halves else 1)
        if served != list(range(drawn)):
            raise ValueError(f"the groups serve the models {served}, and the protocol draws from the first {drawn}")

    @cached_property
    def shards(self) -> tuple[str, ...]:
        return tuple(shard for group in self.groups for shard in group.shards)
