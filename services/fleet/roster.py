"""Which shards serve which models, and the protocol that follows from how many parts there are."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from services.privacy.protocol import Protocol


@dataclass(frozen=True)
class Block:
    """Consecutive parts of the ensemble: their models, by number, with the names of their adapters.

    `shards` names the actors that serve them. Several are copies of one another: they share the work of a block, and
    none of its parts counts twice.
    """

    index: int
    models: Mapping[int, str]
    shards: tuple[str, ...]


@dataclass(frozen=True)
class Roster:
    """What a coordinator asks from its next token on; a higher version replaces a lower one.

    Raises:
        ValueError: two blocks serve the same model, or the blocks' models are not those that the protocol draws from.
    """

    version: int
    protocol: Protocol
    blocks: tuple[Block, ...]

    def __post_init__(self) -> None:
        served = sorted(model for block in self.blocks for model in block.models)
        drawn = self.protocol.parts * (2 if self.protocol.halves else 1)
        if served != list(range(drawn)):
            raise ValueError(f"the blocks serve the models {served}, and the protocol draws from the first {drawn}")

    @cached_property
    def shards(self) -> tuple[str, ...]:
        return tuple(shard for block in self.blocks for shard in block.shards)
