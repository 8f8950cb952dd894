"""Claim: reducing rows beside their engines, on any number of shards, releases what the rows together release."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, set_num_threads

from privmix.privacy.mollifiers.shaping import SamplingOptions, shape, shape_public
from privmix.privacy.protocol import Answers, Protocol, Release
from privmix.privacy.protocols.exponential import Exponential
from privmix.privacy.protocols.individual import WHOLE, Individual, IndividualSettings
from privmix.privacy.protocols.pmixed import PMixed
from privmix.privacy.sampling.categorical import quantise
from privmix.shards.reducer import Reducer, Reduction, on_host, single_threaded_pool
from tests.support.steps import Operation, Operations

pytestmark = pytest.mark.usefixtures("operators")

PARTS, SEQUENCES, VOCABULARY = 12, 5, 3000
OPTIONS = (
    SamplingOptions(),
    SamplingOptions(temperature=0.5),
    SamplingOptions(top_p=0.9),
    SamplingOptions(temperature=1.5, top_k=40),
    SamplingOptions(temperature=0.05),
)
PROTOCOLS: Mapping[str, Protocol] = {
    "pmixed clip": PMixed(PARTS, 0.2, 0.4),
    "pmixed mix": PMixed(PARTS, 0.2, 1.6, projection="mix"),
    "exponential, all": Exponential(PARTS, PARTS, 2.0),
    "exponential, 5": Exponential(PARTS, 5, 0.7),
    "individual": IndividualSettings(tokens=64).plan(PARTS),
}


def log_probabilities(rows: int, seed: int) -> Tensor:
    return (torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed)) * 4).log_softmax(dim=1)


@pytest.fixture(scope="module")
def public() -> Tensor:
    return log_probabilities(SEQUENCES, 0)


@pytest.fixture(scope="module")
def parts(public: Tensor) -> Tensor:
    """Returns log-probabilities [S, N, V]: near and far parts, one without mass, and one that is broken."""
    far = log_probabilities(SEQUENCES * PARTS, 1).view(SEQUENCES, PARTS, -1)
    rows = torch.lerp(public[:, None], far, torch.linspace(0, 1.5, PARTS)[:, None]).log_softmax(dim=-1)
    rows[:, 3] = torch.where(torch.arange(VOCABULARY) == 7, 0.0, -torch.inf)
    rows[0, 4] = torch.nan
    return rows


def draws(protocol: Protocol) -> list[tuple[int, ...]]:
    drawn = [protocol.draw() for _ in range(SEQUENCES - 1)]
    return [() if isinstance(protocol, PMixed) else drawn[0], *drawn]


def allowances(protocol: Protocol) -> np.ndarray | None:
    if not protocol.event.accounts:
        return None
    return np.random.default_rng(0).integers(0, WHOLE // 32, size=(SEQUENCES, PARTS))


def together(protocol: Protocol, public: Tensor, parts: Tensor, drawn: Sequence[tuple[int, ...]]) -> Release:
    rows = torch.cat([parts[s, list(models)] for s, models in enumerate(drawn)])
    answers = shape(public, rows, drawn, OPTIONS)
    granted = allowances(protocol)
    return protocol.distribution(
        Answers(answers.public, answers.ratios, answers.models, None if granted is None else torch.from_numpy(granted))
    )


def by_shards(
    protocol: Protocol, public: Tensor, parts: Tensor, drawn: Sequence[tuple[int, ...]], shards: int
) -> Release:
    """Reduces the rows of each shard's parts, and adds them up in the first."""
    reducer, begun, partials = Reducer(), None, []
    granted = allowances(protocol)
    for shard in range(shards):
        models = range(shard * PARTS // shards, (shard + 1) * PARTS // shards)
        width = min(protocol.rows or 0, len(models))
        own = [[model for model in one if model in models] for one in drawn]
        rows, flags = [], np.zeros((SEQUENCES, width), dtype=np.bool_)
        allowed = None if granted is None else np.ascontiguousarray(granted[:, models.start : models.stop])
        for s, one in enumerate(own):
            padding = [public[s]] * (width - len(one))
            # Rounding of another shard: its own public row is not used.
            rows += [public[s] + 0.01 * shard, *parts[s, one], *padding]
            flags[s, : len(one)] = True
        given = torch.stack(rows), Reduction(protocol, OPTIONS, flags, allowed)
        if begun is None:
            begun = reducer.begin(*given)
        else:
            partials.append(reducer.partial(*given, read_only(begun.public)))
    assert begun is not None
    cumulative = reducer.weights(begun, [read_only(torch.from_numpy(sums)) for sums, _ in partials])
    charges = [begun.charges, *(own if own is None else torch.from_numpy(own) for _, own in partials)]
    known = [own.cpu() for own in charges if own is not None]
    weights = cumulative.cpu().diff(dim=1, prepend=torch.zeros(SEQUENCES, 1, dtype=torch.int64))
    return Release(weights, charges=torch.cat(known, dim=1) if known else None)


def read_only(values: Tensor) -> np.ndarray:
    """Returns values as another process reads them from Ray's memory."""
    array = on_host(values).copy()
    array.flags.writeable = False
    return array


def rounding_of_sums(protocol: Individual, public: Tensor) -> Tensor:
    """Returns how far apart the weights of two orders of a sum of tilts may be: README, Theorem 4, "Integers".

    Each is within ``2^-51 N (1 + U) + 2^-50 (1 + U)`` of the exact one, relative to ``2^61 p0``, and is rounded.
    """
    each = (1 + protocol.upper) * (2.0**-51 * protocol.parts + 2.0**-50)
    return 1 + 2.0**61 * 2 * each * public.double()


@pytest.mark.exact
@pytest.mark.parametrize("shards", [1, 2, 4, PARTS])
@pytest.mark.parametrize("name", PROTOCOLS)
def test_shards_release_what_all_rows_together_release(name: str, shards: int, public: Tensor, parts: Tensor) -> None:
    """To the last integer; the float64 sums of tilts to the rounding that each part pays for."""
    protocol = PROTOCOLS[name]
    drawn = draws(protocol)
    expected = together(protocol, public, parts, drawn)
    actual = by_shards(protocol, public, parts, drawn, shards)
    if not isinstance(protocol, Individual):
        assert torch.equal(actual.weights, expected.weights)
        return
    apart = (actual.weights - expected.weights).abs()
    assert bool((apart <= rounding_of_sums(protocol, shape_public(public, OPTIONS))).all())
    assert actual.charges is not None
    assert expected.charges is not None
    assert torch.equal(actual.charges, expected.charges)
    assert bool((expected.charges > 0).any())
    granted = allowances(protocol)
    assert granted is not None
    assert bool((actual.charges <= torch.from_numpy(granted)).all())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU is here")
@pytest.mark.parametrize("name", PROTOCOLS)
def test_shards_on_gpus_release_what_those_on_cpus_do(name: str, public: Tensor, parts: Tensor) -> None:
    """Up to rounding. In Triton's interpreter the kernels are 2e-6 away from a CPU."""
    protocol = PROTOCOLS[name]
    drawn = draws(protocol)
    laws = []
    for device in ("cpu", "cuda"):
        weights = by_shards(protocol, public.to(device), parts.to(device), drawn, 2).weights.double()
        laws.append(weights / weights.sum(dim=1, keepdim=True))
    assert (laws[0] - laws[1]).abs().sum(dim=1).max() < 1e-4


@pytest.mark.parametrize(("sample", "sent"), [(1, np.int16), (3, np.int16), (128, np.int16), (129, np.int32)])
def test_sums_leave_in_the_smallest_type_that_holds_those_of_all_groups(sample: int, sent: type) -> None:
    """At the bound: all parts say the same token, which p0 hardly expects, so every score is clipped."""
    protocol = Exponential(sample, sample, 0.5)
    public = torch.zeros(1, 8)
    said = torch.full((1, sample, 8), -30.0)
    said[:, :, 5] = 0.0
    reducer, groups = Reducer(), sorted({0, sample // 3, sample // 2, sample})
    sums, p0 = [], shape_public(public, OPTIONS[:1]).numpy()
    for first, last in pairwise(groups):
        rows = torch.cat([public, said[0, first:last]])
        given = Reduction(protocol, OPTIONS[:1], np.ones((1, last - first), dtype=np.bool_))
        sums.append(reducer.partial(rows, given, p0)[0])
    assert {each.dtype for each in sums} == {np.dtype(sent)}
    whole = protocol.added([torch.from_numpy(each) for each in sums])
    most = whole.max().item()
    assert most == -whole.min().item(), "both ends are reached"
    assert most == sample * protocol._steps
    if sent is np.int16:
        assert 2**15 - 1 - sample < most < 2**15, "one step more would not fit"
    else:
        assert 2**29 < most <= 2**30
    given = Reduction(protocol, OPTIONS[:1], np.ones((1, sample), dtype=np.bool_))
    expected, _ = Reducer().partial(torch.cat([public, said[0]]), given, p0)
    assert torch.equal(whole, torch.from_numpy(expected).to(whole.dtype))


@pytest.mark.parametrize("sample", [1, 128, 129, 1000])
def test_sums_beyond_those_of_a_draw_are_refused(sample: int) -> None:
    """Of more parts than a token pays for, whose cost would be another. Nothing wraps around in a narrow type."""
    protocol = Exponential(sample, sample, 0.5)
    edge = protocol.narrowed(torch.full((1, 3), sample * protocol._steps, dtype=torch.int32))
    assert protocol.combine(torch.full((1, 3), 1 / 3), protocol.added([edge, 0 * edge])).weights.sum() > 0
    for beyond in ([edge, 0 * edge + 1], [-edge, 0 * edge - 1], [edge] * 3, [-edge] * 2, [edge] * 4, [edge] * 5):
        with pytest.raises(ValueError, match="sums must be at most"):
            protocol.added(beyond)


WAITS = {"aten._local_scalar_dense.default", "aten.nonzero.default", "aten.item.default"}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_the_operations_depend_on_shapes_alone(name: str, public: Tensor, parts: Tensor) -> None:
    """Neither a draw nor a row changes them, and nothing waits for a value of a part."""
    protocol = PROTOCOLS[name]
    width = protocol.rows
    assert width is not None
    recorded = []
    for drawn, rows in ((True, parts), (False, parts), (True, public[:, None].expand_as(parts))):
        flags = np.full((SEQUENCES, width), drawn, dtype=np.bool_)
        granted = allowances(protocol)
        reducer = Reducer()
        reducer._threads = 1  # a dispatch mode sees only its own thread
        asked = torch.cat([public[:, None], rows[:, :width]], dim=1).flatten(0, 1)
        given = Reduction(protocol, OPTIONS, flags, granted)
        p0 = reducer.begin(asked, given).public.numpy()
        operations: list[Operation] = []
        with Operations(operations):
            reducer.partial(asked, given, p0)
        recorded.append(operations)
    assert recorded[0] == recorded[1] == recorded[2]
    assert len(recorded[0]) > 15
    assert not WAITS & {operation for operation, *_ in recorded[0]}


@pytest.mark.exact
def test_a_call_without_private_sequences_returns_p0(public: Tensor) -> None:
    given = Reduction(PROTOCOLS["pmixed clip"], OPTIONS, np.zeros((0, 1), dtype=np.bool_))
    begun = Reducer().begin(public, given)
    expected = shape(public, public[:0], [()] * SEQUENCES, OPTIONS).public
    assert torch.equal(begun.public, expected)
    assert begun.sums is None
    assert torch.equal(Reducer().weights(begun), quantise(expected).cumsum(dim=1))


def test_a_share_has_one_thread_although_vllm_fixes_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    pool = single_threaded_pool(2)
    assert [pool.submit(torch.get_num_threads).result() for _ in range(2)] == [1, 1]


def test_a_pool_leaves_other_threads_their_number() -> None:
    """An engine that starts after a pool reads it: vLLM's attention stops where two libraries see two numbers."""
    before = torch.get_num_threads()
    try:
        for number in (2, 3):
            set_num_threads(number)
            pool = single_threaded_pool(4)
            assert {pool.submit(torch.get_num_threads).result() for _ in range(8)} == {1}
            with ThreadPoolExecutor(1) as later:
                assert later.submit(torch.get_num_threads).result() == torch.get_num_threads() == number
    finally:
        set_num_threads(before)
