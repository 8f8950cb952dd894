"""Claim: options apply to all distributions alike and depend on p0 alone, and no part can cause a failure."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from privmix.privacy.mollifiers import shaping
from privmix.privacy.mollifiers.shaping import SUPPORT_FLOOR, SamplingOptions, shape, shape_public
from privmix.privacy.protocol import Answers

Row = NDArray[np.float64]
VOCABULARY = 4000
# Every third token, and the most likely ones of both kinds of rows are mostly not among them.
LEGAL = np.packbits(np.arange(VOCABULARY - 100) % 3 == 0, bitorder="little").tobytes()
OPTIONS = [
    SamplingOptions(),
    SamplingOptions(temperature=0.3),
    SamplingOptions(temperature=2.5, top_k=40),
    SamplingOptions(top_p=0.7),
    SamplingOptions(temperature=0.02),
    SamplingOptions(temperature=1.3, top_p=0.95, top_k=500),
    SamplingOptions(top_p=0.9999),
    SamplingOptions(legal=LEGAL),
    SamplingOptions(temperature=0.3, top_p=0.7, top_k=40, legal=LEGAL),
    SamplingOptions(temperature=1.5, legal=bytes(40) + b"\x11"),
]


def logits(rows: int, seed: int) -> Tensor:
    return (torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4).log_softmax(dim=1)


def literally(log_p: Tensor, options: SamplingOptions, kept: NDArray[np.bool_] | None = None) -> Row:
    """Shapes one row by the literal definitions, in double precision."""
    p = np.exp(log_p.double().numpy() / options.temperature)
    p /= p.sum()
    if kept is not None:
        return np.where(kept, p, 0) / p[kept].sum()
    if options.legal is not None:
        bits = np.unpackbits(np.frombuffer(options.legal, np.uint8), bitorder="little")
        legal = np.zeros(VOCABULARY, bool)
        legal[: len(bits)] = bits > 0
        p[~legal] = 0
        p /= p.sum()
    order = np.argsort(-p)
    if options.top_k:
        p[order[options.top_k :]] = 0
        p /= p.sum()
    cumulative = np.cumsum(p[order])
    p[order[1 + int((cumulative < options.top_p).sum()) :]] = 0
    p /= p.sum()
    p[p < SUPPORT_FLOOR] = 0
    return np.asarray(p / p.sum())


@pytest.mark.parametrize("options", OPTIONS, ids=range(len(OPTIONS)))
def test_shaped_distributions_are_those_of_the_definitions(options: SamplingOptions) -> None:
    public, parts = logits(1, seed=1), logits(3, seed=2) * 0.7 + logits(1, seed=1) * 0.3
    answers = shape(public, parts, [(4, 5, 6)], options)
    expected = literally(public[0], options)
    np.testing.assert_allclose(answers.public[0], expected, rtol=1e-4, atol=1e-12)
    for ratios, log_p in zip(answers.ratios, parts, strict=True):
        shaped = literally(log_p, options, kept=expected > 0)
        np.testing.assert_allclose(ratios.double() * answers.public[0].double(), shaped, rtol=2e-4, atol=1e-12)
    assert answers.models == ((4, 5, 6),)


@pytest.mark.exact
def test_each_sequence_has_its_own_options_and_rows() -> None:
    public, parts = logits(3, seed=3), logits(4, seed=4)
    together = shape(public, parts, [(0, 1), (), (2, 3)], OPTIONS[:3])
    for s, rows in enumerate((parts[:2], parts[2:2], parts[2:])):
        alone = shape(public[s : s + 1], rows, [together.models[s]], OPTIONS[s])
        assert torch.equal(alone.public[0], together.public[s])
        first, last = list(together.spans())[s]
        assert torch.equal(alone.ratios, together.ratios[first:last])


def test_tokens_that_tie_with_the_last_one_kept_stay() -> None:
    public = torch.tensor([[0.4, 0.2, 0.2, 0.1, 0.1]]).log()
    for options in (SamplingOptions(top_k=2), SamplingOptions(top_p=0.5)):
        kept = shape(public, torch.empty(0, 5), [()], options).public[0] > 0
        assert kept.tolist() == [True, True, True, False, False]


@pytest.mark.exact
@pytest.mark.parametrize("temperature", [0.05, 1.0, 3.0])
def test_an_unusable_part_counts_as_the_public_model(temperature: float) -> None:
    public = torch.tensor([0.5, 0.3, 0.2 - 1e-12, 1e-12]).log()
    outside = torch.tensor([-math.inf, -math.inf, -math.inf, 0.0])
    parts = torch.stack([public, public, public, public, outside])
    parts[0, 1], parts[1, 2], parts[2] = math.nan, math.inf, -math.inf
    parts[3, 3] = math.nan  # an error although the token is not kept
    answers = shape(public[None], parts, [tuple(range(5))], SamplingOptions(temperature=temperature, top_k=3))
    assert answers.ratios.tolist() == [[1.0, 1.0, 1.0, 0.0]] * 5


def test_low_temperatures_neither_overflow_nor_vanish() -> None:
    public, parts = (logits(1, seed=5) * 0.02).log_softmax(dim=1), logits(2, seed=6)
    answers = shape(public, parts, [(0, 1)], SamplingOptions(temperature=0.01))
    likeliest = torch.where(answers.public > 0, parts, -math.inf).argmax(dim=1)
    assert (answers.ratios * answers.public)[[0, 1], likeliest].tolist() == pytest.approx([1, 1], abs=0.01)


@pytest.mark.exact
def test_ratios_may_take_the_memory_of_the_parts() -> None:
    public, parts = logits(1, seed=7), logits(2, seed=8)
    expected = shape(public, parts, [(0, 1)]).ratios
    answers = shape(public, parts, [(0, 1)], overwrite_parts=True)
    assert answers.ratios.data_ptr() == parts.data_ptr()
    assert torch.equal(answers.ratios, expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_broken_public_row_is_an_error(bad: float) -> None:
    public = torch.zeros(2, 5)
    public[1, 3] = bad
    with pytest.raises(ValueError, match="public model"):
        shape(public, torch.empty(0, 5), [(), ()])
    with pytest.raises(ValueError, match="public model"):
        shape(torch.full((1, 5), -math.inf), torch.empty(0, 5), [()])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (0.0, -1.0, math.nan, math.inf)),
        *(("top_p", value) for value in (0.0, 1.5, math.nan)),
        *(("top_k", value) for value in (0, -3)),
    ],
)
def test_impossible_options_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingOptions(**{field: value})  # type: ignore[arg-type]


def test_shapes_that_do_not_match_are_refused() -> None:
    public, parts = torch.zeros(2, 5), torch.zeros(3, 5)
    with pytest.raises(ValueError, match="options has 1 entries"):
        shape(public, parts, [(0,), (1, 2)], [SamplingOptions()])
    with pytest.raises(ValueError, match="columns"):
        shape(public, torch.zeros(3, 6), [(0,), (1, 2)])
    with pytest.raises(ValueError, match=r"ratios must be \[2, 5\]"):
        shape(public, parts, [(0,), (1,)])
    with pytest.raises(ValueError, match="models names 1 sequences"):
        shape(public, parts, [(0, 1, 2)])
    with pytest.raises(ValueError, match="float32"):
        Answers(public.double(), parts, ((0,), (1, 2)))


def test_a_sequence_has_its_own_options_in_whatever_block_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    log_p = logits(len(OPTIONS), 0)
    whole = shape_public(log_p, OPTIONS)
    monkeypatch.setattr(shaping, "rows_at_once", lambda rows: 3)
    torch.testing.assert_close(shape_public(log_p, OPTIONS), whole)
