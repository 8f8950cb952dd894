"""Claim: an engine answers requests beyond its capacity in several rounds, and reports a stall."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.sample.ops.topk_topp_sampler import flashinfer_sampler_supported

from privmix.engine import vllm_engine
from privmix.engine.adapter_config import LORA_RANKS, slot_bytes
from privmix.engine.adapter_slots import AdapterSlots
from privmix.engine.engine import PUBLIC, ZERO, EngineSettings, EngineStalledError, Request, create
from privmix.engine.reader_rows import ReaderRows
from privmix.engine.vllm_engine import VllmEngine
from tests.ensembles import write_adapters
from tests.services.engine.vllm_starts import recorded_slots, start_with
from tests.tiny import write_tiny_llama

CONTEXT = 512
NAMES = tuple(f"part-{index}" for index in range(6))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    """A model of random weights, small enough for hundreds of sequences in seconds."""
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(folder / "model", layers=2, context=CONTEXT)
    adapters = write_adapters(folder / "adapters", NAMES, folder / "model")
    return EngineSettings(folder / "model", "vllm", "float32", CONTEXT, cache_gib=1, adapters=adapters)


@pytest.fixture(scope="module")
def engine(settings: EngineSettings, request: pytest.FixtureRequest) -> Iterator[VllmEngine]:
    """The `usual` engine, or a `small` one: 4 sessions, 6 readers, 64 tokens a step, 8 cache blocks of 128 tokens.

    The small one starts like the first one on a machine, and asks no other process what its model can do.
    """
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "small":
            patch.setattr(vllm_engine, "MAX_SESSIONS", 4)
            patch.setattr(vllm_engine, "MAX_READERS", 6)
            patch.setattr(vllm_engine, "MAX_SCHEDULED_TOKENS", 64)
            start_with(patch, num_gpu_blocks_override=9, block_size=128)
        built = VllmEngine(settings)
        yield built
        built.close()


usual, small = (pytest.mark.parametrize("engine", [name], indirect=True) for name in ("usual", "small"))


@pytest.fixture(scope="module")
def expected(settings: EngineSettings) -> Any:
    """Rows of the transformers engine."""
    reference = create(replace(settings, kind="transformers"))
    yield reference.next_token
    reference.close()


def context(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 128, (length,), generator=generator).tolist())


def assert_same(rows: torch.Tensor, expected: torch.Tensor) -> None:
    assert (rows.exp() - expected.exp()).abs().max() < 1e-4


def release(engine: VllmEngine, requests: list[Request]) -> None:
    for request in requests:
        engine.drop_caches(request.sequence)


def few_slots(patch: pytest.MonkeyPatch) -> list[int]:
    """Gives engines 4 adapter slots. Returns the list of the loads into them."""
    loads: list[int] = []
    load = AdapterSlots._load

    def counted(slots: AdapterSlots, adapter: int) -> None:
        loads.append(adapter)
        load(slots, adapter)

    start_with(patch, max_loras=4)
    patch.setattr(AdapterSlots, "_load", counted)
    return loads


# The first tests create and close their own engines, because vLLM supports one per process.
def test_an_adapter_takes_memory_for_the_layers_that_it_changes(settings: EngineSettings, tmp_path: Path) -> None:
    """`test_more_adapters_than_slots` shows that an engine allocates this much."""
    one, two = (
        write_adapters(tmp_path / str(layers), NAMES[:1], settings.model, layers=layers)[NAMES[0]] for layers in (1, 2)
    )
    assert 0 < 2 * slot_bytes(one, 8, 4, key_width=32) == slot_bytes(two, 8, 4, key_width=32)


def test_logits_are_in_float32_where_it_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for on_cpu, batch_invariant, expected in ((True, "0", "model"), (False, "0", "float32"), (False, "1", "model")):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", batch_invariant)
        assert vllm_engine._head_dtype(on_cpu) == expected


def test_no_engine_needs_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not installed here, and its sampler needs a compiler (vLLM #49497)."""
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda _: True)
    assert not flashinfer_sampler_supported()


def test_float32_with_adapters_is_refused_on_a_gpu(settings: EngineSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "current_platform", SimpleNamespace(is_cpu=lambda: False))
    with pytest.raises(ValueError, match=r"dtype: .* not in float32; set engine\.dtype"):
        VllmEngine(settings)


@pytest.mark.parametrize(("fitting", "slots"), [(10, vllm_engine.MIN_SLOTS), (40, 40), (1000, 51)])
def test_slots_fill_their_share_of_a_gpu(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch, fitting: int, slots: int
) -> None:
    """By the size that slots have in the serving type: no more than 50 adapters and the zero adapter need."""
    path, rank = next(iter(settings.adapters.values())), LORA_RANKS[0]
    many = replace(settings, dtype="bfloat16", adapters={f"part-{number}": path for number in range(50)})
    share = vllm_engine.SLOTS_MEMORY * many.gpu_memory_utilization
    memory = (fitting + 0.5) * slot_bytes(path, rank, 2, key_width=32) / share
    monkeypatch.setattr(vllm_engine, "current_platform", SimpleNamespace(get_device_total_memory=lambda: memory))
    assert vllm_engine._gpu_slots(many, rank, LlamaConfig.from_pretrained(settings.model)) == slots


def test_more_adapters_than_slots(settings: EngineSettings, expected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier adapters on the device do not affect rows, and each row of a step costs one load."""
    loads, allocated = few_slots(monkeypatch), recorded_slots(monkeypatch)
    engine = VllmEngine(settings)
    slot = slot_bytes(next(iter(settings.adapters.values())), LORA_RANKS[0], 4, key_width=32)
    assert allocated == [4 * slot]
    for step, drawn in enumerate(["012", "012", "345", "340", "541"]):
        before = len(loads)
        requests = [
            Request(
                "first", context(20 + step), (PUBLIC, *(NAMES[int(part)] for part in drawn[:2] if part != drawn[2]))
            ),
            Request("second", context(30 + step), (NAMES[int(drawn[2])], ZERO)),
        ]
        assert_same(engine.next_token(requests), expected(requests))
        rows = sum(len(request.adapters) for request in requests) - 1
        assert len(loads) - before == rows
    steps: list[int] = []
    compute = engine._compute

    def recorded(step: list[vllm_engine.SessionRequest], rows: int | None) -> None:
        steps.append(len(step))
        compute(step, rows)

    monkeypatch.setattr(engine, "_compute", recorded)
    for drawn in ("012345", "010101", "454545"):
        pairs = [(NAMES[int(drawn[at])], NAMES[int(drawn[at + 1])]) for at in (0, 2, 4)]
        requests = [Request(f"drawn-{at}", context(40, at), (PUBLIC, *pair)) for at, pair in enumerate(pairs)]
        assert_same(engine.next_token(requests), expected(requests))
    assert steps == 3 * [2, 1], "the number of steps does not depend on the draw"
    engine.close()


def test_an_error_within_a_pass_is_a_failure_and_no_refusal(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM has entered the blocks of the pass into its cache by then: such an engine must be replaced."""
    engine = VllmEngine(settings)

    def broken(*_: Any) -> None:
        raise ValueError("no slot")

    with monkeypatch.context() as patch:
        patch.setattr(ReaderRows, "_plan", broken)
        with pytest.raises(RuntimeError, match="a pass failed: no slot"):
            engine.next_token([Request("one", context(20), (PUBLIC,))])
    engine.close()


@pytest.mark.parametrize(("capability", "non_causal"), [((9, 0), False), ((10, 0), True), ((12, 0), False)])
def test_a_gpu_whose_usual_attention_needs_a_causal_mask_gets_another(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], non_causal: bool
) -> None:
    device = DeviceCapability(*capability)
    monkeypatch.setattr(type(current_platform), "get_device_capability", classmethod(lambda *_, **__: device))
    assert vllm_engine._engine_args(settings, [], {}).attention_config.use_non_causal is non_causal


@usual
def test_a_cached_prefix_is_found_under_its_own_salt_only(engine: VllmEngine) -> None:
    """A prefix in the cache gives an earlier first token, so a shared one would let a client test guesses."""
    prompt = context(CONTEXT - 8)

    def computed(sequence: str, salt: str | None) -> int:
        before = engine._worker("tokens_computed")
        engine.next_token([Request(sequence, prompt, (PUBLIC, NAMES[0]), salt)])
        engine.drop_caches(sequence)
        return engine._worker("tokens_computed") - before

    assert computed("first", "one client") == len(prompt)
    assert computed("guess", "another client") == len(prompt), "another client finds the prompt"
    assert computed("guess without a salt", None) == len(prompt)
    assert computed("again", "one client") < len(prompt), "the client itself does not"


@small
def test_more_sequences_than_sessions(engine: VllmEngine, expected: Any) -> None:
    requests = [Request(f"many-{seed}", context(20, seed), (PUBLIC, NAMES[seed % 6])) for seed in range(11)]
    for length in (20, 21):
        step = [replace(request, tokens=context(length, seed)) for seed, request in enumerate(requests)]
        assert_same(engine.next_token(step), expected(step))
    release(engine, requests)


@small
def test_more_readers_than_a_step_holds(engine: VllmEngine, expected: Any) -> None:
    """The excess readers belong to several sequences together, or to a single one."""
    requests = [
        Request(f"rows-{seed}", context(30, seed), (PUBLIC, *NAMES, *[ZERO] * 9, "part-3")[:-1]) for seed in range(3)
    ]
    assert_same(engine.next_token(requests), expected(requests))
    release(engine, requests)


@small
def test_contexts_that_fill_the_cache(engine: VllmEngine, expected: Any) -> None:
    """Four contexts need four blocks each, so eight blocks hold two at a time. Each exceeds one batch."""
    requests = [Request(f"full-{seed}", context(CONTEXT - 3, seed), ("part-1", PUBLIC)) for seed in range(4)]
    for more in (0, 1, 2):
        step = [replace(request, tokens=(*request.tokens, *(7,) * more)) for request in requests]
        assert_same(engine.next_token(step), expected(step))
    release(engine, requests)


@small
def test_preempted_requests_continue(engine: VllmEngine, expected: Any) -> None:
    """vLLM drops their caches and computes them again, also those that no call continues."""
    requests = [Request(f"preempted-{seed}", context(90 + seed, seed), (PUBLIC, "part-1")) for seed in range(4)]
    engine.next_token(requests)
    for more in range(1, 4):
        scheduler = engine._core.engine_core.scheduler
        assert scheduler.reset_prefix_cache(reset_running_requests=True)
        batch = [replace(request, tokens=(*request.tokens, *(9, 3) * more)) for request in requests[more:]]
        assert_same(engine.next_token(batch), expected(batch))
    assert {session.request.num_preemptions for session in engine._sessions.values()} == {3}
    release(engine, requests)


@small
def test_the_same_request_may_follow_itself(engine: VllmEngine, expected: Any) -> None:
    """The very same tuple of tokens, which is longer than what the session had before, but not than what it has now."""
    engine.next_token([Request("twice", context(20), (PUBLIC,))])
    request = Request("twice", (*context(20), 5), (PUBLIC, *NAMES, *[ZERO] * 3))
    for _ in range(3):
        assert_same(engine.next_token([request]), expected([request]))
    engine.drop_caches("twice")


@small
def test_each_token_is_checked(engine: VllmEngine) -> None:
    """A token outside the vocabulary is found in what is new, also after a context that does not continue."""
    tokens = context(20)
    engine.next_token([Request("checked", tokens, (PUBLIC,))])
    for wrong in ((*tokens, 128), (*tokens[:-1], -1, 3)):
        with pytest.raises(ValueError, match=r"tokens: every token id lies in \[0, 128\)"):
            engine.next_token([Request("checked", wrong, (PUBLIC,))])
    engine.drop_caches("checked")


@small
def test_a_stalled_engine_reports_it_and_recovers(
    engine: VllmEngine, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM admits 4 sessions, and a fifth would wait for ever while those are parked."""
    parked = [Request(f"parked-{seed}", context(10, seed), (PUBLIC,)) for seed in range(4)]
    engine.next_token(parked)
    fifth = Request("fifth", context(10, 9), (PUBLIC, "part-2"))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "_most_sessions", 100)
        with pytest.raises(EngineStalledError, match="no progress with 1 of its requests"):
            engine.next_token([fifth])
    assert_same(engine.next_token([fifth]), expected([fifth]))
    release(engine, [*parked, fifth])


@small
def test_a_context_that_no_cache_holds_is_refused(
    engine: VllmEngine, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "_blocks", 2)
    request = Request("large", context(CONTEXT - 3), (PUBLIC,))
    with pytest.raises(ValueError, match=r"tokens: .* more than the cache holds; raise cache_gib"):
        engine.next_token([request])
