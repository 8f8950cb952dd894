"""Every part group of the ensemble that the fleet may start, served yet or not."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.engine.engine import EngineSettings


@dataclass(frozen=True)
class ShardPlan:
    """A part group that can be served: its models, by number, its engine, and what Ray reserves for each copy.

    `parts` counts the parts of the group, `copies` the actors that serve it. `environment` follows from the machine on
    which the plan was made.
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
        """The parts of the group; each has as many models as any other."""
        first = min(self.models) * self.parts // len(self.models)
        return range(first, first + self.parts)

    @property
    def shards(self) -> tuple[str, ...]:
        """The names of the actors."""
        name = f"shard-{self.index:03d}"
        return (name, *(f"{name}-copy-{copy}" for copy in range(1, self.copies)))
