"""Asks one shard directly, as a coordinator that has told it nothing."""

from collections.abc import Mapping, Sequence
from typing import Any

from privmix.coordinator.copies import ShardCopies, Told
from privmix.coordinator.group import Group
from privmix.coordinator.step import Step
from privmix.fleet.shard_map import PartGroup
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocol import Protocol
from privmix.shards.sessions import Asked, StepKey

KEY = StepKey("test", 1, 0)


def asked(
    protocol: Protocol,
    models: Mapping[int, str],
    contexts: Mapping[str, tuple[int, ...]],
    draws: Sequence[tuple[int, ...]],
    key: StepKey = KEY,
) -> Asked:
    """Asks for a token of each sequence. The first ones are private, one for each draw."""
    count = len(contexts)
    options = (SamplingOptions(),) * count
    lengths = tuple(map(len, contexts.values()))
    step = Step(tuple(contexts), tuple(contexts.values()), lengths, (None,) * count, options, tuple(draws))
    group = Group(PartGroup(0, models, ()), protocol, ShardCopies((), dict[str, Any]().__getitem__, 1.0))
    return group.asked(key, step, Told())
