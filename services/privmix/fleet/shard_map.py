"""Maps parts to shards and holds the protocol for the number of parts that are served."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from privmix.privacy.protocol import Protocol


@dataclass(frozen=True, slots=True)
class Size:
    """Says how many part groups serve, and how many copies each of them has."""

    shards: int
    copies: int = 1

    def __str__(self) -> str:
        shards = f"{self.shards} shard{'s' * (self.shards > 1)}"
        return shards if self.copies == 1 else f"{shards} with {self.copies} copies each"


@dataclass(frozen=True)
class PartGroup:
    """Holds consecutive parts of the ensemble that the same shards serve.

    Attributes:
        models: the adapters' names, by model number.
        shards: the Ray names of the actors. Several actors are copies, which divide the sequences among them.
    """

    index: int
    models: Mapping[int, str]
    shards: tuple[str, ...]


@dataclass(frozen=True)
class ShardMap:
    """Names the shards that serve each part, and the protocol for that number of parts. The highest version wins.

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

    @property
    def size(self) -> Size:
        return Size(len(self.groups), len(self.groups[0].shards))

    @cached_property
    def shards(self) -> tuple[str, ...]:
        return tuple(shard for group in self.groups for shard in group.shards)
