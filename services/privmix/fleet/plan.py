"""Describes the part groups that the fleet can start."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from privmix.engine.engine import EngineSettings

START_TIMEOUT_S = 900.0
"""How long a shard may take to start, including the wait for a new node."""


@dataclass(frozen=True)
class ShardPlan:
    """Describes one part group: its models, its engine, and the resources that Ray reserves for each of its copies.

    Attributes:
        parts: the number of parts in the group.
        models: the adapters' names, by model number.
        environment: environment variables of the actors, derived from the machine that computed the plan.
    """

    index: int
    parts: int
    models: Mapping[int, str]
    engine: EngineSettings
    num_cpus: float
    num_gpus: float
    environment: Mapping[str, str] = field(compare=False)

    @property
    def part_numbers(self) -> range:
        """The numbers of the group's parts. All parts have the same number of models."""
        first = min(self.models) * self.parts // len(self.models)
        return range(first, first + self.parts)

    def shards(self, copies: int) -> tuple[str, ...]:
        """Returns the Ray names of the first copies."""
        return tuple(f"shard-{self.index:03d}" + f"-copy-{copy}" * (copy > 0) for copy in range(copies))


def numbers_of(name: str) -> tuple[int, int] | None:
    """Returns the part group and the copy with this Ray name, each counted from 0; None if it is no shard's."""
    found = re.fullmatch(r"shard-(\d+)(?:-copy-(\d+))?", name)
    return found and (int(found[1]), int(found[2] or 0))
