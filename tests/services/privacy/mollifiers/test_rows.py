"""Claim: a compiled pass over rows does what torch's operators do, one after another."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import (
    Tensor,
    set_num_threads,  # bound before an engine of vLLM in this process makes torch's do nothing
)

from privmix.foundation import compiled
from privmix.privacy.mollifiers import projection, rows
from privmix.privacy.mollifiers.mixture import accepted
from privmix.privacy.mollifiers.shaping import SamplingOptions, shape_public

SEQUENCES, PARTS, VOCABULARY = 2, 5, 3001


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


def both(work: Callable[[], Tensor], monkeypatch: pytest.MonkeyPatch) -> tuple[Tensor, Tensor]:
    assert compiled.operators(rows.SOURCE) is not None
    one = work().clone()
    monkeypatch.setattr(compiled, "operators", lambda _: None)
    return one, work().clone()


def shaped(log_p: Tensor, public: Tensor, scale: float) -> Tensor:
    return rows.shape_parts(log_p, public, torch.tensor([scale, 2 * scale]), torch.empty_like(log_p))


@pytest.mark.parametrize("scale", [0.5, 1 / math.log(2), 30.0])
def test_shaping(log_p: Tensor, public: Tensor, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, apart = both(lambda: shaped(log_p, public, scale), monkeypatch)
    torch.testing.assert_close(fused, apart, rtol=3e-5, atol=2.0**-54)
    means = (fused.double() * public[:, None]).sum(-1)
    assert (means - public.double().sum(-1, keepdim=True)).abs().max() < 1e-5
    for s, i in ((0, 1), (0, 2), (1, 0), (1, 1)):
        assert torch.equal(fused[s, i], public[s].sign()), "a row that is unusable is one of p0"


@pytest.mark.usefixtures("operators")
def test_shaping_of_logits_in_bfloat16(public: Tensor) -> None:
    """A constant that a row lacks, and its type, change nothing but rounding."""
    logits = torch.randn(SEQUENCES, PARTS, VOCABULARY, generator=torch.Generator().manual_seed(0)).mul(6).bfloat16()
    exact = shaped(logits.double().log_softmax(-1).float(), public, 1.0)
    out = torch.empty_like(exact)
    ratios = rows.shape_parts(logits, public, torch.tensor([1.0, 2.0]), out)
    torch.testing.assert_close(ratios, exact, rtol=1e-4, atol=2.0**-54)


@pytest.mark.exact
def test_shaping_in_place_and_of_rows_that_are_not_contiguous(log_p: Tensor, public: Tensor) -> None:
    expected = shaped(log_p, public, 1.0)
    scales = torch.tensor([1.0, 2.0])
    wide = torch.zeros(SEQUENCES, PARTS + 1, VOCABULARY)
    wide[:, 1:] = log_p
    assert torch.equal(rows.shape_parts(wide[:, 1:], public, scales, torch.empty_like(log_p)), expected)
    assert torch.equal(rows.shape_parts(log_p, public, scales, log_p), expected)


def test_powers_of_two_are_exact_to_float32(monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("low", [0.0, 0.9])
def test_moments_and_sums(log_p: Tensor, public: Tensor, low: float, monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = shaped(log_p, public, 1.0)
    bounds = torch.full((SEQUENCES, PARTS), low), torch.linspace(1.0, 30.0, 10).view(SEQUENCES, PARTS)
    scales = torch.linspace(0, 2, 10, dtype=torch.float64).view(SEQUENCES, PARTS)
    exact = ratios.clamp(bounds[0][:, :, None], bounds[1][:, :, None]).double()
    p0 = public.double()
    means, seconds = (torch.einsum("snv,sv->sn", power, p0) for power in (exact, exact.square()))
    results: dict[Callable[[], Tensor], tuple[Tensor, float]] = {
        lambda: rows.clipped_means(ratios, public, *bounds): (means.float(), 1e-5),
        lambda: rows.clipped_moments(ratios, p0, *bounds): (torch.stack([means, seconds]), 1e-12),
        lambda: rows.clipped_sums(ratios, *bounds, scales): (torch.einsum("snv,sn->sv", exact, scales), 1e-12),
    }
    for work, (expected, tolerance) in results.items():
        with monkeypatch.context() as patch:
            for result in both(work, patch):
                torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.exact
def test_summed_steps_are_the_same_integers(log_p: Tensor, public: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = shaped(log_p, public, 1.0)
    drawn = torch.tensor([[True, True, False, True, True], [False, True, True, True, False]])
    centres = torch.linspace(-0.3, 0.3, 10).view(SEQUENCES, PARTS)
    most = 2**27
    fused, apart = both(lambda: rows.summed_steps(ratios, centres, drawn, most / 0.7, most), monkeypatch)
    assert torch.equal(fused, apart)
    assert fused.abs().max() > most
    ones = rows.summed_steps(ratios, centres, drawn & False, most / 0.7, most)
    assert not ones.any(), "rows that are not drawn add nothing"


@pytest.mark.exact
@pytest.mark.parametrize("radius", [0.01, 0.4, 1.6, 6.0])
def test_a_scale_brings_the_clipped_sum_to_one(log_p: Tensor, public: Tensor, radius: float) -> None:
    """In all forms of rows, to the same bits. Of a part without mass on nearly all of p0, no scale does."""
    ratios = shaped(log_p, public, 1.0)
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
