"""Claim: what a part says, or a client's options, does not show in the time of a step.

On a CPU the logarithm of 0, a power that underflows, and a product with a subnormal number take ten to a hundred times
as long as others. So no such number may reach these functions, or come of them.
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
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.reduction import reduce
from tests.support.mechanisms import audited

PARTS = 8
SETTINGS = [
    PROTOCOLS[name].model_validate({"epsilon": 8, "tokens": 1024, **parameters})
    for name, parameters in [*audited(PARTS), ("submix", {})]
    if not {"q", "sample"} & set(parameters)
]
OPTIONS = (
    SamplingOptions(),
    SamplingOptions(temperature=0.1),
    SamplingOptions(top_k=50),
    SamplingOptions(top_p=0.9),
    SamplingOptions(legal=bytes([0b10110101] * 64)),
)
VOCABULARY = 512


class Slow(TorchDispatchMode):
    """Notes the operations over a vocabulary in which a number takes longer than another one."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.seen = 0

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = operator.overloadpacket.__name__.rstrip("_")
        given = arguments[0] if arguments else None
        if isinstance(given, Tensor) and given.is_floating_point() and given.numel() >= VOCABULARY:
            smallest = torch.finfo(given.dtype).smallest_normal
            least = {"log": smallest, "log2": smallest, "sqrt": smallest, "exp": math.log(smallest)}.get(name)
            self.seen += least is not None
            if least is not None and float(given.min()) < least:
                self.found.add(f"{name} of {float(given.min())}")
        result = operator(*arguments, **(keywords or {}))
        computed = not (operator.is_view or name.startswith(("empty", "new_empty", "detach")))
        if computed and isinstance(result, Tensor) and result.is_floating_point() and result.numel() >= VOCABULARY:
            sizes = result.abs()
            if bool(((sizes > 0) & (sizes < torch.finfo(result.dtype).smallest_normal)).any()):
                self.found.add(f"a subnormal number of {name}")
        return result


def worlds(protocol: Protocol) -> tuple[Tensor, list[Tensor]]:
    """The public model's row; rows near to it, and the same where one part is certain, sure, or far from the others."""
    generator = torch.Generator().manual_seed(0)
    rows = 2 * PARTS if protocol.halves else protocol.rows or PARTS
    public = torch.randn(1, VOCABULARY, generator=generator)
    near = public.repeat(rows, 1) + 0.2 * torch.randn(rows, VOCABULARY, generator=generator)
    others = [near.clone() for _ in range(4)]
    others[0][0, 77] += 400.0
    others[1][0, 77] += 60.0
    others[2][0] *= 20.0
    others[3][0, ::2] = -math.inf
    return public, [near, *others]


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
def test_no_number_takes_longer_than_another(settings: Any, options: SamplingOptions) -> None:
    protocol = settings.plan(PARTS)
    public, every = worlds(protocol)
    step(protocol, public, every[0].clone(), options)  # which computes tables that are kept
    for rows in every:
        with Slow() as slow:
            step(protocol, public, rows.clone(), options)
        assert slow.seen
        assert not slow.found
