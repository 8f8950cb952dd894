"""Compares the kernels that reduce rows on a GPU with float64, with torch's operators and with a CPU.

- The exponential mechanism: `nats` is the largest difference of an exponent from the same formula in float64 without
  steps, less half a step of each row; `variation` the largest total variation between the laws of a token by the
  kernels and by the formula with steps.
- Individual budgets: `tilt` and `charge` are the largest differences from torch's operators, over the largest value.
- PMixed: `variation` is the largest total variation of a projected part from torch's operators.
- Sampling: `weight` is the largest difference of a weight from the CPU's, over its total; `tokens` the number of tokens
  that differ for the same weights and points.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from privmix.privacy.mollifiers import rows
from privmix.privacy.mollifiers.shaping import (
    SamplingOptions,
    bits_per_nat,
    shape_public,
    temperatures,
)
from privmix.privacy.protocols.exponential import Exponential
from privmix.privacy.protocols.individual import WHOLE, IndividualSettings
from privmix.privacy.protocols.pmixed import PMixed
from privmix.privacy.reduction import reduce_at
from privmix.privacy.sampling.categorical import accumulated, tokens_at

RADIUS, TOKENS = 1.6, 1024
_LN2 = math.log(2)
OPTIONS = (SamplingOptions(), SamplingOptions(temperature=0.3), SamplingOptions(top_k=50), SamplingOptions(top_p=0.9))


def logits(sequences: int, parts: int, vocabulary: int, device: str) -> Tensor:
    """Returns a public row and part rows of each sequence, [S, 1 + n, V]: log-ratios of N(0, 0.7) to a steep p0."""
    generator = torch.Generator(device).manual_seed(0)
    falling = -1.5 * torch.log(torch.arange(1, vocabulary + 1, dtype=torch.float32, device=device))
    order = torch.rand((sequences, vocabulary), generator=generator, device=device).argsort(dim=1)
    made = falling[order][:, None].repeat(1, 1 + parts, 1)
    made[:, 1:] += 0.7 * torch.randn((sequences, parts, vocabulary), generator=generator, device=device)
    return made


def spoilt(made: Tensor) -> Tensor:
    """Returns rows [S, 1 + n, V] of which parts of the first sequence fail, say nothing, or say little."""
    made[0, 1, 17] = torch.nan
    made[0, 2, 3] = torch.inf
    made[0, 3] = -torch.inf
    made[0, 4, made.shape[2] // 8 :] = -torch.inf
    return made


def asked(made: Tensor, options: Sequence[SamplingOptions] = OPTIONS) -> tuple[Tensor, Tensor, Tensor]:
    """Returns p0, the parts' rows, and the temperatures."""
    return shape_public(made[:, 0], options), made[:, 1:], temperatures(options, made.device)


@contextmanager
def torch_alone() -> Iterator[None]:
    """Reduces rows on a GPU with torch's operators."""
    with patch.object(rows, "_triton", lambda: None):
        yield


def exact_scores(protocol: Exponential, public: Tensor, log_p: Tensor, scales: Tensor, drawn: Tensor) -> Tensor:
    """Returns the scores of `Exponential.partial` before they are steps, computed in float64: nats, [S, n, V]."""
    p0 = public.double()[:, None]
    bits = log_p.double() * scales.double()[:, None, None]
    broken = ~(bits < torch.inf).all(dim=2, keepdim=True)
    logs = torch.where(p0 > 0, bits, -torch.inf)
    mass = (logs * _LN2).logsumexp(dim=2, keepdim=True)
    unusable = broken | ~mass.isfinite()
    ratios = torch.where(unusable, 1.0, (logs * _LN2 - mass).exp() / p0.clamp(min=2.0**-40)) * (p0 > 0)

    def log_mean(shift: Tensor) -> Tensor:
        low, high = (-protocol._clip - shift).exp(), (protocol._clip - shift).exp()
        return (ratios.clamp(low, high) * p0).sum(dim=2, keepdim=True).log() + shift

    first = log_mean(torch.zeros_like(mass))
    slope = ((log_mean(first) - first) / torch.where(first == 0, 1.0, first)).clamp(0, 0.95)
    centres = (first / (1 - slope)).clamp(-protocol._clip, protocol._clip)
    scores = (ratios.log() + centres).clamp(-protocol._clip, protocol._clip)
    return scores * drawn[:, :, None]


def agreement_of_the_exponential(parts: int, vocabulary: int, device: str) -> dict[str, float]:
    """Compares the kernels with float64.

    Raises:
        AssertionError: a sum is beyond what the parts that are drawn can say, or one that is not drawn says something.
    """
    protocol = Exponential(parts, parts, RADIUS)
    made = spoilt(logits(len(OPTIONS), parts, vocabulary, device))
    public, log_p, degrees = asked(made)
    drawn = torch.ones((len(OPTIONS), parts), dtype=torch.bool, device=device)
    drawn[1, 2:] = False
    drawn[2] = False
    sums = reduce_at(protocol, public, log_p, degrees, drawn).sums
    assert sums.dtype == torch.int32
    assert bool((sums.abs().amax(dim=1) <= protocol._steps * drawn.sum(dim=1)).all())
    exact = exact_scores(protocol, public, log_p, bits_per_nat(degrees), drawn)
    steps = (exact / protocol._step).round().sum(dim=1) * protocol._step
    scores = sums.double() * protocol._step
    kept = public > 0
    apart = torch.where(kept, (scores - exact.sum(dim=1)).abs() / parts, 0.0)
    laws = [torch.where(kept, (each / parts).exp() * public, 0.0) for each in (scores, steps)]
    first, second = (law / law.sum(dim=1, keepdim=True) for law in laws)
    return {
        "nats": max(0.0, float(apart.max()) - protocol._step / 2),
        "variation": float((first - second).abs().sum(dim=1).max() / 2),
    }


def agreement_of_tilts(parts: int, vocabulary: int, device: str) -> dict[str, float]:
    """Compares the kernels with torch's operators. AssertionError: a charge is above its allowance."""
    protocol = IndividualSettings(tokens=TOKENS).plan(parts)
    given = asked(spoilt(logits(len(OPTIONS), parts, vocabulary, device)))
    drawn = torch.ones((len(OPTIONS), parts), dtype=torch.bool, device=device)
    allowances = torch.arange(len(OPTIONS) * parts, device=device).view_as(drawn) * (WHOLE // TOKENS // parts)
    ours = reduce_at(protocol, *given, drawn, allowances)
    with torch_alone():
        theirs = reduce_at(protocol, *given, drawn, allowances)
    assert ours.charges is not None
    assert theirs.charges is not None
    assert bool((ours.charges <= allowances).all())
    return {
        "tilt": float((ours.sums - theirs.sums).abs().max() / theirs.sums.abs().max()),
        "charge": float((ours.charges - theirs.charges).abs().max() / theirs.charges.max()),
    }


def agreement_of_projections(parts: int, vocabulary: int, device: str) -> dict[str, float]:
    """Compares the projected row of the part that is drawn for each sequence with torch's operators."""
    protocol = PMixed(parts, 1.0, RADIUS)
    made = logits(len(OPTIONS), parts, vocabulary, device)
    made[0, 1, 17] = torch.nan
    given = asked(made)
    drawn = torch.zeros((len(OPTIONS), parts), dtype=torch.bool, device=device)
    drawn[:, 0] = True
    ours = reduce_at(protocol, *given, drawn).sums
    with torch_alone():
        theirs = reduce_at(protocol, *given, drawn).sums
    return {"variation": float((ours - theirs).abs().sum(dim=1).max() / 2)}


def agreement_of_samples(parts: int, vocabulary: int, device: str) -> dict[str, float]:
    """Compares weights, and tokens of the same weights and points, with those of a CPU."""
    protocol = Exponential(parts, parts, RADIUS)
    given = asked(logits(len(OPTIONS), parts, vocabulary, device), (SamplingOptions(),) * len(OPTIONS))
    drawn = torch.ones((len(OPTIONS), parts), dtype=torch.bool, device=device)
    public, sums = given[0], reduce_at(protocol, *given, drawn).sums
    ours, theirs = protocol.combine(public, sums).weights, protocol.combine(public.cpu(), sums.cpu()).weights
    cumulative = accumulated(ours)
    totals = cumulative[:, -1].tolist()
    points = torch.tensor([[total * step // 1000 for step in range(1000)] for total in totals]).T
    tokens = torch.stack([tokens_at(own.contiguous().to(device), cumulative).cpu() for own in points])
    expected = torch.stack([tokens_at(own.contiguous(), accumulated(ours.cpu())) for own in points])
    return {
        "weight": float((ours.cpu() - theirs).abs().max() / min(totals)),
        "tokens": int((tokens != expected).sum()),
    }
