"""Claim: what a part says, or a client's options, does not show in the time of a step.

On a CPU the logarithm of 0 and a power that underflows take ten to a hundred times as long as others. So no such number
may reach one of these functions.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from privmix.foundation import compiled
from privmix.privacy.mollifiers.shaping import SamplingOptions, shape, shape_public
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols.adapmixed import AdaPMixedSettings
from privmix.privacy.protocols.exponential import ExponentialSettings
from privmix.privacy.protocols.gnmax import GNMaxSettings
from privmix.privacy.protocols.individual import IndividualSettings
from privmix.privacy.protocols.pmixed import PMixedSettings
from privmix.privacy.protocols.submix import SubMixSettings
from privmix.privacy.protocols.subsample_aggregate import SubsampleAggregateSettings
from privmix.privacy.reduction import reduce

PARTS = 8
SETTINGS = (
    ExponentialSettings(epsilon=8, tokens=1024),
    IndividualSettings(epsilon=8, tokens=1024),
    PMixedSettings(epsilon=8, tokens=1024),
    AdaPMixedSettings(epsilon=8, tokens=1024),
    GNMaxSettings(epsilon=8, tokens=1024),
    SubsampleAggregateSettings(epsilon=8, tokens=1024),
    SubMixSettings(epsilon=8, tokens=1024),
)
OPTIONS = (
    SamplingOptions(),
    SamplingOptions(temperature=0.1),
    SamplingOptions(top_k=50),
    SamplingOptions(top_p=0.9),
    SamplingOptions(legal=bytes([0b10110101] * 64)),
)
SMALLEST = 2.0**-126  # of float32; smaller numbers are subnormal


class Slow(TorchDispatchMode):
    """Notes the logarithms and powers whose number takes longer than another one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = operator.overloadpacket.__name__.rstrip("_")
        given = arguments[0] if arguments else None
        if isinstance(given, Tensor) and given.numel() > 1 and given.dtype == torch.float32:
            low = float(given.min())
            self.seen += name in ("log", "log2", "exp", "exp2")
            if name in ("log", "log2") and low < SMALLEST:
                self.found.append(f"{name} of {low}")
            if name in ("exp", "exp2") and low < math.log(SMALLEST):
                self.found.append(f"{name} of {low}")
        return operator(*arguments, **(keywords or {}))


def worlds(protocol: Protocol, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """The public model's row, rows near to it, and the same rows where one part is certain of a token."""
    generator = torch.Generator().manual_seed(0)
    rows = 2 * PARTS if protocol.halves else protocol.rows or PARTS
    public = torch.randn(1, vocabulary, generator=generator)
    near = public.repeat(rows, 1) + 0.2 * torch.randn(rows, vocabulary, generator=generator)
    certain = near.clone()
    certain[0] = torch.log_softmax(certain[0], -1)
    certain[0, 77] += 400.0
    return public, near, certain


def step(protocol: Protocol, public: Tensor, rows: Tensor, options: SamplingOptions) -> None:
    """What a shard and a coordinator compute for one token of one sequence."""
    if protocol.additive:
        p0 = shape_public(public, [options])
        drawn = torch.ones((1, len(rows)), dtype=torch.bool)
        allowances = torch.full((1, len(rows)), 2**30) if protocol.event.accounts else None
        part = reduce(protocol, p0, rows[None], [options], drawn, allowances)
        protocol.combine(p0, part.sums, part.charges)
    else:
        protocol.distribution(shape(public.clone(), rows, [tuple(range(len(rows)))], [options]))


@pytest.fixture(params=["compiled", "operators of torch"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param != "compiled":
        monkeypatch.setattr(compiled, "operators", lambda source: None)


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: settings.protocol)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "cold", "top_k", "top_p", "legal"])
def test_no_slow_number_reaches_a_logarithm_or_a_power(settings: Any, options: SamplingOptions) -> None:
    protocol = settings.plan(PARTS)
    public, *both = worlds(protocol, 512)
    for rows in both:
        with Slow() as slow:
            step(protocol, public, rows.clone(), options)
        assert slow.seen
        assert not slow.found
