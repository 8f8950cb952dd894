"""Claim: compiled passes over rows, and Triton's kernels, do what torch's operators do, one after another.

With a GPU the kernels run there. Elsewhere Triton's interpreter runs them, in a process of its own, since Triton
chooses it when it is imported; and Triton builds them for the kind of GPU that they were made for.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import (
    Tensor,
    set_num_threads,  # bound before an engine of vLLM in this process makes torch's do nothing
)

from privmix.foundation import compiled
from privmix.privacy import mollifiers, reduction
from privmix.privacy.mollifiers import projection, rows
from privmix.privacy.mollifiers.mixture import accepted
from privmix.privacy.mollifiers.shaping import SamplingOptions, bits_per_nat, shape_public, temperatures
from privmix.privacy.protocols.exponential import Exponential
from privmix.privacy.protocols.individual import WHOLE, IndividualSettings
from privmix.privacy.reduction import reduce_at
from privmix.privacy.sampling.categorical import accumulated, tokens_at

SEQUENCES, PARTS, VOCABULARY = 2, 5, 9001
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RADIUS = 1.6
OPTIONS = (SamplingOptions(), SamplingOptions(temperature=0.3), SamplingOptions(top_k=50), SamplingOptions(top_p=0.9))
Run = Callable[..., Any]
Both = Callable[..., tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Returns what calls a function of a module with the kernels in use."""
    pytest.importorskip("triton", reason="Triton is not installed: neither a CUDA build of torch nor vLLM brought it")
    if DEVICE == "cuda":
        yield lambda function, *arguments: function(*arguments)
        return
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        with patch.dict(os.environ, TRITON_INTERPRET="1"):
            process.submit(os.getpid).result()
        yield lambda function, *arguments: process.submit(interpreted, function, *arguments).result()


def interpreted(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function while the kernels take the rows of a CPU."""
    np.seterr(invalid="ignore", divide="ignore", over="ignore")  # the interpreter computes with NumPy
    with (
        patch.object(rows, "_kernels", lambda *_: rows._triton()),
        patch.object(compiled, "operators", lambda _: None),
    ):
        return function(*arguments)


@pytest.fixture
def log_p() -> Tensor:
    """Returns log-probabilities of which some rows are unusable: NaN, infinity, and no mass where p0 has some."""
    made = torch.randn(SEQUENCES, PARTS, VOCABULARY, generator=torch.Generator().manual_seed(0)).mul(6).log_softmax(-1)
    made[0, 1] = torch.where(torch.arange(VOCABULARY) == 3, 0.0, -math.inf)
    made[0, 2, 17] = math.nan
    made[1, 0, 0] = math.inf
    made[1, 1] = -math.inf
    return made


@pytest.fixture
def public() -> Tensor:
    p0 = torch.randn(SEQUENCES, VOCABULARY, generator=torch.Generator().manual_seed(1)).mul(6).softmax(-1)
    p0[p0 < 2.0**-36] = 0
    p0[0, 3] = 0
    return p0


@pytest.fixture(params=["compiled", "triton"])
def both(request: pytest.FixtureRequest) -> Both:
    """Returns what computes a result by compiled passes or by the kernels, and by torch's operators, on the CPU."""
    if request.param == "triton":
        run = request.getfixturevalue("run")
        return lambda function, *arguments: (
            run(function, *(each.to(DEVICE, copy=True) for each in arguments)).cpu(),
            by_torch(function, *arguments),
        )
    assert compiled.operators(rows.SOURCE) is not None
    return lambda function, *arguments: (
        function(*(each.clone() for each in arguments)).clone(),
        by_torch(function, *arguments),
    )


def by_torch(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    with patch.object(rows, "_kernels", lambda *_: None), patch.object(compiled, "operators", lambda _: None):
        return function(*arguments)


def logits(sequences: int) -> Tensor:
    """Returns a public row and part rows of each sequence, [S, 1 + n, V]: log-ratios of N(0, 0.7) to a steep p0."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    falling = -1.5 * torch.log(torch.arange(1, VOCABULARY + 1, dtype=torch.float32, device=DEVICE))
    order = torch.rand((sequences, VOCABULARY), generator=generator, device=DEVICE).argsort(dim=1)
    made = falling[order][:, None].repeat(1, 1 + PARTS, 1)
    made[:, 1:] += 0.7 * torch.randn((sequences, PARTS, VOCABULARY), generator=generator, device=DEVICE)
    return made


def asked(options: Sequence[SamplingOptions]) -> tuple[Tensor, Tensor, Tensor]:
    """Returns p0, the parts' rows, of which some fail, say nothing, or say little, and the temperatures."""
    made = logits(len(options))
    made[0, 1, 17] = torch.nan
    made[0, 2, 3] = torch.inf
    made[0, 3] = -torch.inf
    made[0, 4, VOCABULARY // 8 :] = -torch.inf
    return shape_public(made[:, 0], options), made[:, 1:], temperatures(options, made.device)


def exact_scores(protocol: Exponential, public: Tensor, log_p: Tensor, scales: Tensor, drawn: Tensor) -> Tensor:
    """Returns the scores of `Exponential.partial` before they are steps, computed in float64: nats, [S, n, V]."""
    p0 = public.double()[:, None]
    bits = log_p.double() * scales.double()[:, None, None]
    broken = ~(bits < torch.inf).all(dim=2, keepdim=True)
    logs = torch.where(p0 > 0, bits, -torch.inf)
    mass = (logs * math.log(2)).logsumexp(dim=2, keepdim=True)
    unusable = broken | ~mass.isfinite()
    ratios = torch.where(unusable, 1.0, (logs * math.log(2) - mass).exp() / p0.clamp(min=2.0**-40)) * (p0 > 0)

    def log_mean(shift: Tensor) -> Tensor:
        low, high = (-protocol._clip - shift).exp(), (protocol._clip - shift).exp()
        return (ratios.clamp(low, high) * p0).sum(dim=2, keepdim=True).log() + shift

    first = log_mean(torch.zeros_like(mass))
    slope = ((log_mean(first) - first) / torch.where(first == 0, 1.0, first)).clamp(0, 0.95)
    centres = (first / (1 - slope)).clamp(-protocol._clip, protocol._clip)
    scores = (ratios.log() + centres).clamp(-protocol._clip, protocol._clip)
    return scores * drawn[:, :, None]


def check_scores() -> None:
    """Compares the kernels with the same formula in float64, without steps and with them, and the laws of a token."""
    protocol = Exponential(PARTS, PARTS, RADIUS)
    public, log_p, degrees = asked(OPTIONS)
    drawn = torch.ones((len(OPTIONS), PARTS), dtype=torch.bool, device=DEVICE)
    drawn[1, 2:] = False
    drawn[2] = False
    sums = reduce_at(protocol, public, log_p, degrees, drawn).sums
    assert sums.dtype == torch.int32
    assert bool((sums.abs().amax(dim=1) <= protocol._steps * drawn.sum(dim=1)).all())
    exact = exact_scores(protocol, public, log_p, bits_per_nat(degrees), drawn)
    steps = (exact / protocol._step).round().sum(dim=1) * protocol._step
    scores = sums.double() * protocol._step
    kept = public > 0
    apart = torch.where(kept, (scores - exact.sum(dim=1)).abs() / PARTS, 0.0)
    assert float(apart.max()) - protocol._step / 2 < 1e-4
    laws = [torch.where(kept, (each / PARTS).exp() * public, 0.0) for each in (scores, steps)]
    first, second = (law / law.sum(dim=1, keepdim=True) for law in laws)
    assert float((first - second).abs().sum(dim=1).max() / 2) < 1e-5


def test_sums_of_scores_are_those_of_float64(run: Run) -> None:
    run(check_scores)


def check_tilts() -> None:
    protocol = IndividualSettings(tokens=1024).plan(PARTS)
    drawn = torch.ones((len(OPTIONS), PARTS), dtype=torch.bool, device=DEVICE)
    allowances = torch.arange(drawn.numel(), device=DEVICE).view_as(drawn) * (WHOLE // 1024 // PARTS)
    given = *asked(OPTIONS), drawn, allowances
    ours = reduce_at(protocol, *given)
    with patch.object(rows, "_triton", lambda: None):
        theirs = reduce_at(protocol, *given)
    assert ours.charges is not None
    assert theirs.charges is not None
    assert bool((ours.charges <= allowances).all())
    assert float((ours.sums - theirs.sums).abs().max() / theirs.sums.abs().max()) < 1e-5
    assert float((ours.charges - theirs.charges).abs().max() / theirs.charges.max()) < 1e-4


def test_tilts_and_charges_are_those_of_torch(run: Run) -> None:
    run(check_tilts)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU")
def test_a_gpu_makes_the_tokens_of_a_cpu() -> None:
    """Of the same sums, and then of the same weights and points."""
    protocol = Exponential(PARTS, PARTS, RADIUS)
    given = asked((SamplingOptions(),) * len(OPTIONS))
    drawn = torch.ones((len(OPTIONS), PARTS), dtype=torch.bool, device=DEVICE)
    public, sums = given[0], reduce_at(protocol, *given, drawn).sums
    ours, theirs = protocol.combine(public, sums).weights, protocol.combine(public.cpu(), sums.cpu()).weights
    cumulative = accumulated(ours)
    totals = cumulative[:, -1].tolist()
    assert float((ours.cpu() - theirs).abs().max() / min(totals)) < 2.0**-40
    points = torch.tensor([[total * step // 1000 for step in range(1000)] for total in totals]).T
    tokens = torch.stack([tokens_at(own.contiguous().to(DEVICE), cumulative).cpu() for own in points])
    assert torch.equal(tokens, torch.stack([tokens_at(own.contiguous(), accumulated(ours.cpu())) for own in points]))


def shaped(log_p: Tensor, public: Tensor, scale: float = 1.0) -> Tensor:
    """Shapes rows that lie apart in memory."""
    wide = torch.zeros((SEQUENCES, PARTS + 1, VOCABULARY), dtype=log_p.dtype, device=log_p.device)
    wide[:, 1:] = log_p
    scales = torch.tensor([scale, 2 * scale], device=log_p.device)
    out = torch.empty(log_p.shape, dtype=torch.float32, device=log_p.device)
    return rows.shape_parts(wide[:, 1:], public, scales, out)


@pytest.mark.parametrize("scale", [0.5, 1 / math.log(2), 30.0])
def test_shaping(scale: float, log_p: Tensor, public: Tensor, both: Both) -> None:
    ours, theirs = both(partial(shaped, scale=scale), log_p, public)
    torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=2.0**-54)
    means = (ours.double() * public[:, None]).sum(-1)
    assert (means - public.double().sum(-1, keepdim=True)).abs().max() < 1e-5
    for s, i in ((0, 1), (0, 2), (1, 0), (1, 1)):
        assert torch.equal(ours[s, i], public[s].sign()), "a row that is unusable is one of p0"


def in_place(log_p: Tensor, public: Tensor) -> Tensor:
    return rows.shape_parts(log_p, public, torch.ones(SEQUENCES, device=log_p.device), log_p)


def test_shaping_of_logits_in_bfloat16_and_in_place(log_p: Tensor, public: Tensor, both: Both) -> None:
    for shaping, given in ((shaped, log_p.bfloat16()), (in_place, log_p.clone())):
        torch.testing.assert_close(*both(shaping, given, public), rtol=3e-5, atol=2.0**-54)


PASSES: Mapping[str, tuple[Callable[..., Tensor], float]] = {
    "means": (lambda ratios, p0, low, high, _: rows.clipped_means(ratios, p0, low, high), 1e-5),
    "moments": (lambda ratios, p0, low, high, _: rows.clipped_moments(ratios, p0.double(), low, high), 1e-12),
    "sums": (lambda ratios, _, low, high, scales: rows.clipped_sums(ratios, low, high, scales), 1e-12),
}


def passed(name: str, *arguments: Tensor) -> Tensor:
    return PASSES[name][0](*arguments)


@pytest.mark.parametrize("low", [0.0, 0.9])
def test_means_moments_and_sums(low: float, log_p: Tensor, public: Tensor, both: Both) -> None:
    ratios = shaped(log_p, public)
    bounds = torch.full((SEQUENCES, PARTS), low), torch.linspace(1.0, 30.0, 10).view(SEQUENCES, PARTS)
    scales = torch.linspace(0, 2, 10, dtype=torch.float64).view(SEQUENCES, PARTS)
    exact = ratios.clamp(bounds[0][:, :, None], bounds[1][:, :, None]).double()
    means, seconds = (torch.einsum("snv,sv->sn", power, public.double()) for power in (exact, exact.square()))
    expected = {
        "means": means.float(),
        "moments": torch.stack([means, seconds]),
        "sums": torch.einsum("snv,sn->sv", exact, scales),
    }
    for name, (_, tolerance) in PASSES.items():
        for result in both(partial(passed, name), ratios, public, *bounds, scales):
            torch.testing.assert_close(result, expected[name], rtol=tolerance, atol=tolerance)


def steps_of_nonsense(public: Tensor, drawn: Tensor, most: int) -> Tensor:
    """Adds up the steps of rows whose largest logit, mass and centre are numbers that no row has."""
    from privmix.privacy.mollifiers import rows_triton

    device = public.device
    nonsense = torch.tensor([math.nan, math.inf, -math.inf, 1e38, -1e38], device=device)
    scores = nonsense[torch.arange(4 * drawn.numel(), device=device) % 7 % 5].view(*drawn.shape, 4)
    log_p = nonsense[torch.arange(drawn.numel() * VOCABULARY, device=device) % 5].view(*drawn.shape, VOCABULARY)
    sums = torch.empty(public.shape, dtype=torch.int32, device=device)
    scales = torch.tensor([1.0, math.nan], device=device)
    given = log_p, public, scales, scores, drawn, sums, math.inf, float(most), most
    rows_triton._for_each_tile(rows_triton._sum_steps, *given)
    return sums


@pytest.mark.parametrize("parts", [1, PARTS, 1000])
def test_a_row_says_no_more_than_its_bound_whatever_floats_do(parts: int, public: Tensor, run: Run) -> None:
    """The bounded range of Theorem 2 rests on this alone; the floats here are those of no row."""
    most = Exponential(1000, parts, 0.7)._steps
    drawn = torch.arange(SEQUENCES * min(parts, PARTS)).view(SEQUENCES, -1) % 3 != 1
    sums = run(steps_of_nonsense, public.to(DEVICE), drawn.to(DEVICE), most).cpu()
    counts = drawn.sum(dim=1, keepdim=True)
    assert bool((sums.abs() <= most * counts).all())
    assert bool(
        (sums.abs() == most * counts).any(),
    ), "some rows reach the bound"


def reduced(log_p: Tensor, public: Tensor, drawn: Tensor) -> Tensor:
    protocol = Exponential(drawn.shape[1], drawn.shape[1], 0.7)
    return reduction.reduce(protocol, public, log_p, (SamplingOptions(),) * SEQUENCES, drawn).sums


def test_a_row_is_the_same_beside_any_others(log_p: Tensor, public: Tensor, run: Run) -> None:
    """What a part adds is a function of its own row and p0: Theorem 2. Rows that are not drawn add nothing."""
    parts = 3  # each is unusable in some sequence
    placed, p0 = log_p[:, :parts].to(DEVICE), public.to(DEVICE)
    alone = []
    for part in range(parts):
        drawn = torch.zeros((SEQUENCES, parts), dtype=torch.bool, device=DEVICE)
        drawn[:, part] = True
        alone.append(run(reduced, placed, p0, drawn).cpu())
    everyone = torch.ones((SEQUENCES, parts), dtype=torch.bool, device=DEVICE)
    assert torch.equal(run(reduced, placed, p0, everyone).cpu(), torch.stack(alone).sum(dim=0, dtype=torch.int32))
    others = placed.clone()
    others[:, 1:] = 3 * placed.flip(1)[:, 1:]
    first = torch.zeros((SEQUENCES, parts), dtype=torch.bool, device=DEVICE)
    first[:, 0] = True
    assert torch.equal(run(reduced, others, p0, first).cpu(), alone[0])
    assert alone[0].any()


def clipped(ratios: Tensor, public: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Returns the projected rows, and the scales that the kernel found for them."""
    found: list[Tensor] = []

    def spied(*arguments: Any) -> Tensor:
        scales = rows.clip_scales(*arguments)
        assert scales is not None, "the kernel is in use"
        found.append(scales)
        return scales

    with patch.object(projection, "clip_scales", spied):
        return projection.clip(ratios, public[:, None], radius), found[0]


@pytest.mark.parametrize("radius", [0.01, 0.4, 1.6, 6.0])
def test_projections_are_those_of_torch(radius: float, public: Tensor, run: Run) -> None:
    """Of parts near p0 and far from it, of one that says one token, and of one without mass on nearly all of p0."""
    logs = torch.randn(SEQUENCES, PARTS, VOCABULARY, generator=torch.Generator().manual_seed(3))
    ratios = (logs * torch.tensor([0.1, 2.0, 8.0, 0, 0])[:, None]).exp() * public.sign()[:, None]
    ratios[:, 3] = torch.arange(VOCABULARY) == 5
    ratios[:, 4] = (public < public.median()).to(torch.float32) * public.sign()
    ratios /= (ratios.double() * public[:, None]).sum(dim=-1, keepdim=True).clamp(min=1e-12)
    theirs = by_torch(projection.clip, ratios, public[:, None], radius)
    ours, scales = (each.cpu() for each in run(clipped, ratios.to(DEVICE), public.to(DEVICE), radius))
    assert (ours - theirs).abs().sum(dim=-1).max() < 2e-5
    low, high = math.exp(-radius), math.exp(radius)
    sums = ((ratios * scales).clamp(low, high).double() * public[:, None]).sum(dim=-1)
    assert (sums[:, :3] - 1).abs().max() < projection.TOLERANCE, "the last two parts have no such scale"


@pytest.mark.exact
def test_summed_steps_are_the_same_integers(log_p: Tensor, public: Tensor) -> None:
    ratios = shaped(log_p, public)
    drawn = torch.tensor([[True, True, False, True, True], [False, True, True, True, False]])
    centres = torch.linspace(-0.3, 0.3, 10).view(SEQUENCES, PARTS)
    most = 2**27
    given = ratios, centres, drawn, most / 0.7, most
    fused, apart = rows.summed_steps(*given), by_torch(rows.summed_steps, *given)
    assert torch.equal(fused, apart)
    assert fused.abs().max() > most
    ones = rows.summed_steps(ratios, centres, drawn & False, most / 0.7, most)
    assert not ones.any(), "rows that are not drawn add nothing"


@pytest.mark.exact
@pytest.mark.parametrize("radius", [0.01, 0.4, 1.6, 6.0])
def test_a_scale_brings_the_clipped_sum_to_one(log_p: Tensor, public: Tensor, radius: float) -> None:
    """In all forms of rows, to the same bits. Of a part without mass on nearly all of p0, no scale does."""
    ratios = shaped(log_p, public)
    scales = rows.clip_scales(ratios, public[:, None], radius)
    assert scales is not None
    assert scales.shape == (SEQUENCES, PARTS, 1)
    low, high = math.exp(-radius), math.exp(radius)
    sums = ((ratios.double() * scales).clamp(low, high) * public.double()[:, None]).sum(dim=-1)
    most = torch.where(ratios > 0, high, low).mul(public[:, None]).sum(dim=-1)
    assert ((sums - 1).abs() < 1e-4)[most > 1].all()
    assert (most > 1).sum() > SEQUENCES * PARTS / 2
    flat, own = ratios.flatten(0, 1), public.repeat_interleave(PARTS, dim=0)
    for form, expected in (((flat, own), scales.flatten(0, 1)), ((ratios[1], public[1]), scales[1])):
        found = rows.clip_scales(*form, radius)
        assert found is not None
        assert torch.equal(found, expected)
    assert rows.clip_scales(ratios, public[:, None].expand_as(ratios), radius) is None, "torch's operators take it"


def test_powers_of_two_are_exact_to_float32() -> None:
    """With p0 = 1/V, a ratio is the power times V over the sum of the powers."""
    exponents = torch.linspace(-120, 0, 2**16)
    flat = torch.full((1, len(exponents)), 1 / len(exponents))
    log_p = exponents[None, None]
    ratios = rows.shape_parts(log_p, flat, torch.ones(1), torch.empty_like(log_p))[0, 0].double()
    powers = torch.exp2(exponents.double())
    expected = powers * len(exponents) / powers.sum()
    kept = exponents >= -90
    assert ((ratios - expected).abs() / expected)[kept].max() < 1e-6
    assert not ratios[~kept].any(), "no product with a p0 of 2**-36 or more is subnormal, which would take longer"


@pytest.mark.parametrize("spoil", ["type", "size", "layout"])
def test_the_compiled_passes_refuse_other_types_sizes_and_layouts(public: Tensor, spoil: str) -> None:
    operators = compiled.operators(rows.SOURCE)
    assert operators is not None
    made, bounds = torch.ones(SEQUENCES, PARTS, VOCABULARY), torch.ones(SEQUENCES, PARTS)
    match spoil:
        case "type":
            made = made.double()
        case "size":
            made = made[:, :, 1:].contiguous()
        case "layout":
            public = public.T.contiguous().T
    with pytest.raises(RuntimeError, match="rows must"):
        operators.clipped_means(made, public, bounds, bounds)
    with pytest.raises(RuntimeError, match="rows must"):
        operators.clip_scales(made, public, 0.5, 2.0, -1.0, 100.0)


def every_pass(log_p: Tensor, own_public: Tensor, public: Tensor) -> dict[str, Tensor]:
    """Returns what the additive protocols compute of each row [s, n, V] with the p0 of its sequence [s, V]."""
    p0 = public[:, None]
    ratios = rows.shape_parts(log_p, public, torch.full((len(log_p),), 1.4), torch.empty_like(log_p)).clone()
    low, high = torch.full(ratios.shape[:2], 0.5), torch.full(ratios.shape[:2], 3.0)
    means, squares = rows.clipped_moments(ratios, public.double(), low, high)
    drawn = torch.ones(ratios.shape[:2], dtype=torch.bool)
    return {
        "ratios": ratios,
        "means": rows.clipped_means(ratios, public, low, high),
        "exact means": means,
        "exact squares": squares,
        "steps": rows.summed_steps(ratios, low, drawn, 2.0**20, 2**22)[:, None],
        "clip": accepted(projection.clip(ratios, p0, 0.4), p0),
        "mix": accepted(projection.mix(ratios, p0, 1.6), p0),
        "public": shape_public(own_public, [SamplingOptions(top_p=0.95)] * len(public))[:, None],
    }


@pytest.mark.exact
@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize(("sequences", "parts", "vocabulary"), [(2, 40, 300), (2, 5, 3001), (2, 2, 50_257)])
def test_a_row_has_the_same_bits_among_any_others_and_on_any_number_of_threads(
    sequences: int, parts: int, vocabulary: int
) -> None:
    """So shards and threads, however they divide sequences and parts, release the same integers."""
    generator = torch.Generator().manual_seed(vocabulary)
    log_p = torch.randn(sequences, parts, vocabulary, generator=generator).mul(4).log_softmax(-1)
    own_public = torch.randn(sequences, vocabulary, generator=generator).mul(4).log_softmax(-1)
    public = shape_public(own_public, [SamplingOptions()] * sequences)
    # The sums over parts, and p0, are those of one part.
    of_sequence, differing = {"steps", "public"}, set()
    before = torch.get_num_threads()
    try:
        set_num_threads(1)
        together = every_pass(log_p, own_public, public)
        alone = [every_pass(log_p[:, [i]], own_public, public)["steps"] for i in range(parts)]
        assert torch.equal(torch.stack(alone).sum(dim=0, dtype=torch.int32), together["steps"])
        for threads in (1, 2):
            set_num_threads(threads)
            for s in (slice(1, 2), slice(0, sequences)):
                for i in (slice(1, 2), slice(0, parts)):
                    some = every_pass(log_p[s, i], own_public[s], public[s])
                    for name, values in some.items():
                        if name != "steps" or i == slice(0, parts):
                            whole = together[name][s] if name in of_sequence else together[name][s, i]
                            differing |= set() if torch.equal(values, whole) else {(name, threads)}
    finally:
        set_num_threads(before)
    assert not differing


DOUBLES = "*fp64"
TYPES = {
    **dict.fromkeys(("rows", "public", "scales", "scores", "out", "lows", "highs", "means"), "*fp32"),
    **dict.fromkeys(("radius", "slope", "per_nat", "furthest", "low", "high", "least"), "fp32"),
    **{"drawn": "*i1", "sums": "*i32", "seconds": DOUBLES, "block": "constexpr"},
}
"""The types of a kernel's arguments by their names; others are whole numbers."""
ROW, TILE = (8192, 16), (1024, 4)
KERNELS: Mapping[str, tuple[dict[str, str], tuple[int, int]]] = {
    "_shape_rows": ({}, ROW),
    "_centre_rows": ({}, ROW),
    "_sum_steps": ({}, TILE),
    "_sum_clipped": ({}, ROW),
    "_sum_moments": ({"public": DOUBLES, "means": DOUBLES}, ROW),
    "_find_scales": ({"most": "fp32"}, ROW),
    "_add_clipped": ({"scales": DOUBLES, "sums": DOUBLES}, TILE),
}


@pytest.mark.parametrize("name", KERNELS)
def test_triton_builds_a_kernel_for_hopper(name: str) -> None:
    """Without a GPU: Triton brings the assembler."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from privmix.privacy.mollifiers import rows_triton

    own, (block, warps) = KERNELS[name]
    kernel = getattr(rows_triton, name)
    types = {argument: (TYPES | own).get(argument, "i32") for argument in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=types, constexprs={(len(types) - 1,): block})
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert built.asm["cubin"].startswith(b"\x7fELF")


def test_without_triton_torch_reduces_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, f"{mollifiers.__name__}.rows_triton", raising=False)
    monkeypatch.delattr(mollifiers, "rows_triton", raising=False)
    rows._triton.cache_clear()
    try:
        assert [rows._triton() for _ in range(2)] == [None, None]
    finally:
        rows._triton.cache_clear()
    said = [record.message for record in caplog.records if record.name == rows.__name__]
    assert ["Triton cannot be imported" in message for message in said] == [True]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU")
def test_nothing_waits_for_the_device_and_a_graph_captures_the_kernels() -> None:
    protocol = Exponential(PARTS, PARTS, 0.7)
    made = logits(SEQUENCES)
    degrees = torch.ones(SEQUENCES, device=DEVICE)
    drawn = torch.ones((SEQUENCES, PARTS), dtype=torch.bool, device=DEVICE)

    public = shape_public(made[:, 0], (SamplingOptions(),) * SEQUENCES)

    def step() -> Tensor:
        return reduce_at(protocol, public, made[:, 1:], degrees, drawn).sums

    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums = step()
    made.copy_(made.flip(2) * 0.5)
    graph.replay()
    assert torch.equal(sums, step())
