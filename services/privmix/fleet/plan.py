"""Describes the part groups that the fleet can start."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from privmix.engine.engine import EngineSettings

START_TIMEOUT_S = 900.0
"""How long a shard may take to start, including the wait for a new node."""


@dataclass(frozen=True)
class ShardPlan:
    """Describes one part group: its models, its engine, and the resources that Ray reserves for each copy.

    Attributes:
        parts: the number of parts in the group.
        models: the adapters' names, by model number.
        environment: environment variables of the actors, derived from the machine that computed the plan.
        copies: the number of actors that serve the group.
    """

    index: int
    parts: int
    models: Mapping[int, str]
    engine: EngineSettings
    num_cpus: float
    num_gpus: float
    environment: Mapping[str, str] = field(compare=False)
    copies: int = 1

    @property
    def part_numbers(self) -> range:
        """The numbers of the group's parts. All parts have the same number of models."""
        first = min(self.models) * self.parts // len(self.models)
        return range(first, first + self.parts)

    @property
    def shards(self) -> tuple[str, ...]:
        """The Ray names of the actors."""
        name = f"shard-{self.index:03d}"
        return (name, *(f"{name}-copy-{copy}" for copy in range(1, self.copies)))
