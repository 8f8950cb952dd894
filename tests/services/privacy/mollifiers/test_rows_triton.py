"""Claim: the Triton kernels do what torch's operators do, and no row says more than its bound, whatever floats do.

With a GPU they run there. Elsewhere Triton's interpreter runs them, in a process of its own, since Triton chooses it
when it is imported; and Triton builds them for the kind of GPU that they were made for.
"""

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from privmix.foundation import compiled
from privmix.privacy import mollifiers, reduction
from privmix.privacy.mollifiers import projection, rows
from privmix.privacy.mollifiers.shaping import SamplingOptions, shape_public
from privmix.privacy.protocols.exponential import Exponential
from tests.services.privacy.mollifiers.kernels import (
    agreement_of_projections,
    agreement_of_samples,
    agreement_of_the_exponential,
    agreement_of_tilts,
    logits,
)

pytest.importorskip("triton", reason="Triton is not installed: neither a CUDA build of torch nor vLLM brought it")

SEQUENCES, PARTS, VOCABULARY = 2, 5, 9001
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Run = Callable[..., Any]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Returns what calls a function of a module with the kernels in use."""
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
    """Returns logits of which some rows are unusable: NaN, infinity, and no mass where p0 has some."""
    made = torch.randn(SEQUENCES, PARTS, VOCABULARY, generator=torch.Generator().manual_seed(0)).mul(6)
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


def on_both(run: Run, function: Callable[..., Tensor], *arguments: Any) -> tuple[Tensor, Tensor]:
    """Returns the results of the kernels and of torch's operators, on the CPU."""
    expected = by_torch(function, *arguments)
    placed = [each.to(DEVICE) if isinstance(each, Tensor) else each for each in arguments]
    return run(function, *placed).cpu(), expected


def by_torch(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    with patch.object(rows, "_kernels", lambda *_: None), patch.object(compiled, "operators", lambda _: None):
        return function(*arguments)


def test_sums_of_scores_are_those_of_float64(run: Run) -> None:
    """Of parts that fail, say nothing or say little, at several options, and of parts that are not drawn."""
    agreement = run(agreement_of_the_exponential, PARTS, VOCABULARY, DEVICE)
    assert agreement["nats"] < 1e-4
    assert agreement["variation"] < 1e-5


def test_tilts_and_charges_are_those_of_torch(run: Run) -> None:
    agreement = run(agreement_of_tilts, PARTS, VOCABULARY, DEVICE)
    assert agreement["tilt"] < 1e-5
    assert agreement["charge"] < 1e-4


def test_projected_parts_are_those_of_torch(run: Run) -> None:
    assert run(agreement_of_projections, 1, VOCABULARY, DEVICE)["variation"] < 1e-5


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE != "cuda", reason="needs a CUDA GPU")
def test_a_gpu_makes_the_tokens_of_a_cpu() -> None:
    agreement = agreement_of_samples(PARTS, VOCABULARY, DEVICE)
    assert agreement["weight"] < 2.0**-40
    assert agreement["tokens"] == 0


def shaped(log_p: Tensor, public: Tensor, scale: float) -> Tensor:
    """Shapes rows that lie apart in memory."""
    wide = torch.zeros((SEQUENCES, PARTS + 1, VOCABULARY), dtype=log_p.dtype, device=log_p.device)
    wide[:, 1:] = log_p
    scales = torch.tensor([scale, 2 * scale], device=log_p.device)
    out = torch.empty(log_p.shape, dtype=torch.float32, device=log_p.device)
    return rows.shape_parts(wide[:, 1:], public, scales, out)


@pytest.mark.parametrize("scale", [0.5, 1 / math.log(2), 30.0])
def test_shaping(scale: float, log_p: Tensor, public: Tensor, run: Run) -> None:
    ours, theirs = on_both(run, shaped, log_p, public, scale)
    torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=2.0**-54)
    means = (ours.double() * public[:, None]).sum(-1)
    assert (means - public.double().sum(-1, keepdim=True)).abs().max() < 1e-5
    for s, i in ((0, 1), (0, 2), (1, 0), (1, 1)):
        assert torch.equal(ours[s, i], public[s].sign()), "a row that is unusable is one of p0"


def test_shaping_of_logits_in_bfloat16(log_p: Tensor, public: Tensor, run: Run) -> None:
    ours, theirs = on_both(run, shaped, log_p.bfloat16(), public, 1.0)
    torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=2.0**-54)


def in_place(log_p: Tensor, public: Tensor) -> Tensor:
    return rows.shape_parts(log_p, public, torch.ones(SEQUENCES, device=log_p.device), log_p)


def test_shaping_in_place(log_p: Tensor, public: Tensor, run: Run) -> None:
    ours, theirs = on_both(run, in_place, log_p.clone(), public)
    torch.testing.assert_close(ours, theirs, rtol=3e-5, atol=2.0**-54)


PASSES: Mapping[str, tuple[Callable[..., Tensor], float]] = {
    "means": (lambda ratios, p0, low, high, _: rows.clipped_means(ratios, p0, low, high), 1e-5),
    "moments": (lambda ratios, p0, low, high, _: rows.clipped_moments(ratios, p0.double(), low, high), 1e-12),
    "sums": (lambda ratios, _, low, high, scales: rows.clipped_sums(ratios, low, high, scales), 1e-12),
}


def passed(name: str, *arguments: Tensor) -> Tensor:
    return PASSES[name][0](*arguments)


@pytest.mark.parametrize("name", PASSES)
def test_means_moments_and_sums(name: str, log_p: Tensor, public: Tensor, run: Run) -> None:
    ratios = shaped(log_p, public, 1.0)
    low, high = torch.full((SEQUENCES, PARTS), 0.3), torch.linspace(1.0, 30.0, 10).view(SEQUENCES, PARTS)
    scales = torch.linspace(0, 2, 10, dtype=torch.float64).view(SEQUENCES, PARTS)
    ours, theirs = on_both(run, passed, name, ratios, public, low, high, scales)
    assert ours.dtype == theirs.dtype
    torch.testing.assert_close(ours, theirs, rtol=PASSES[name][1], atol=PASSES[name][1])


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


FLOATS, DOUBLES, INTEGERS = "*fp32", "*fp64", "*i32"
ROWS = {"rows": FLOATS, "vocabulary": "i32", "row_s": "i32", "row_i": "i32"}
ROW, TILE = (8192, 16), (1024, 4)
KERNELS: Mapping[str, tuple[dict[str, str], tuple[int, int]]] = {
    "_shape_rows": (
        {**ROWS, "public": FLOATS, "scales": FLOATS, "out": FLOATS, "out_s": "i32", "out_i": "i32"},
        ROW,
    ),
    "_centre_rows": (
        {**ROWS, "public": FLOATS, "scales": FLOATS, "scores": FLOATS, "radius": "fp32", "slope": "fp32"},
        ROW,
    ),
    "_sum_steps": (
        {
            **ROWS,
            "count": "i32",
            **dict.fromkeys(("public", "scales", "scores"), FLOATS),
            "drawn": "*i1",
            "sums": INTEGERS,
            "per_nat": "fp32",
            "furthest": "fp32",
            "most": "i32",
        },
        TILE,
    ),
    "_sum_clipped": ({**ROWS, **dict.fromkeys(("public", "lows", "highs", "means"), FLOATS)}, ROW),
    "_sum_moments": (
        {**ROWS, "public": DOUBLES, "lows": FLOATS, "highs": FLOATS, "means": DOUBLES, "seconds": DOUBLES},
        ROW,
    ),
    "_find_scales": (
        {
            **ROWS,
            **dict.fromkeys(("public", "scales"), FLOATS),
            **dict.fromkeys(("low", "high", "least", "most"), "fp32"),
        },
        ROW,
    ),
    "_add_clipped": (
        {**ROWS, "count": "i32", "lows": FLOATS, "highs": FLOATS, "scales": DOUBLES, "sums": DOUBLES},
        TILE,
    ),
}


@pytest.mark.parametrize("name", KERNELS)
def test_triton_builds_a_kernel_for_hopper(name: str) -> None:
    """Without a GPU: Triton brings the assembler."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from privmix.privacy.mollifiers import rows_triton

    types, (block, warps) = KERNELS[name]
    source = ASTSource(
        fn=getattr(rows_triton, name),
        signature={**types, "block": "constexpr"},
        constexprs={(len(types),): block},
    )
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
    from privmix.privacy.reduction import reduce_at

    protocol = Exponential(PARTS, PARTS, 0.7)
    made = logits(SEQUENCES, PARTS, VOCABULARY, DEVICE)
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
