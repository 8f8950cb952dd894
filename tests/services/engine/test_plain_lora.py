"""Claim: with plain LoRA parts, no step of vLLM depends on which parts were drawn, and each row is that of PEFT.

An adapter with keys and values of its own that was not drawn for some tokens would have to read them later.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from privmix.engine.adapter_slots import AdapterSlots
from privmix.engine.engine import PUBLIC, ZERO, Engine, EngineSettings, Request, create
from privmix.engine.reader_rows import ReaderRows
from privmix.engine.vllm_engine import VllmEngine
from privmix.training.options import PLAIN_TARGETS
from tests.ensembles import write_adapters
from tests.services.engine.vllm_starts import start_with
from tests.tiny import write_tiny_llama

CONTEXT = 256
NAMES = tuple(f"part-{index}" for index in range(5))
LENGTHS = (30, 31, 32, 40, 41, 42, 43)
"""The lengths of a sequence's context at its steps: one token more, or those that a grammar forces too."""
DRAWS: dict[str, Sequence[Sequence[str]]] = {
    "empty": [()] * len(LENGTHS),
    "one": [NAMES[:2]] * len(LENGTHS),
    "another": [NAMES[3:]] * len(LENGTHS),
    "changing": [(NAMES[step % 5], NAMES[(step + 2) % 5])[: 1 + step % 2] for step in range(len(LENGTHS))],
    "late": [*[()] * (len(LENGTHS) - 1), NAMES[1:3]],
}
TOKENS = tuple(torch.randint(0, 128, (300,), generator=torch.Generator().manual_seed(0)).tolist())


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    """Parts of several ranks, scales, modules and layers, as they may come from elsewhere."""
    folder = tmp_path_factory.mktemp("plain")
    write_tiny_llama(folder / "model", layers=2, context=CONTEXT)
    adapters = write_adapters(folder / "all", NAMES[:3], folder / "model", targets=PLAIN_TARGETS)
    patterns = {"rank_pattern": {"v_proj": 12}, "alpha_pattern": {"v_proj": 16}, "use_rslora": True}
    others: dict[str, Any] = {**patterns, "targets": ("self_attn.k_proj", "v_proj"), "r": 8, "layers_to_transform": [0]}
    adapters |= write_adapters(folder / "few", NAMES[3:], folder / "model", **others)
    return EngineSettings(
        folder / "model", "vllm", "float32", CONTEXT, cache_gib=1, part_kind="lora", adapters=adapters, rows=2
    )


@pytest.fixture(scope="module", params=["usual", "few slots", "small"])
def engine(settings: EngineSettings, request: pytest.FixtureRequest) -> Iterator[VllmEngine]:
    """The usual engine; one with slots for two adapters; and one that reads 64 tokens of one sequence, and evicts."""
    changes: dict[str, Any] = {
        "usual": {},
        "few slots": {"max_loras": 2},
        "small": {"num_gpu_blocks_override": 19, "block_size": 128, "max_num_scheduled_tokens": 64},
    }[request.param]
    with pytest.MonkeyPatch.context() as patch:
        start_with(patch, **changes)
        if request.param == "small":
            patch.setattr("privmix.engine.engine.MAX_ROWS", 6)
        built = VllmEngine(settings)
        yield built
        built.close()


@pytest.fixture(scope="module")
def expected(settings: EngineSettings) -> Iterator[Engine]:
    """The engine that keeps PEFT's rows (`test_families`)."""
    reference = create(replace(settings, kind="transformers"))
    yield reference
    reference.close()


def answered(engine: Engine, draws: Sequence[Sequence[str]]) -> torch.Tensor:
    """Returns the rows of three sequences, [steps, 7, V]: of two private ones and of one that asks for no part."""
    rows = []
    for length, draw in zip(LENGTHS, draws, strict=True):
        filled = [*draw, *[ZERO] * (2 - len(draw))]
        ahead = Request("ahead", TOKENS[: length + 90], (PUBLIC, *filled), "salt")
        behind = Request("behind", TOKENS[:length], (PUBLIC, *reversed(filled)), "salt")
        rows.append(engine.next_token([ahead, behind, Request("public", TOKENS[: length - 20], (PUBLIC,), "salt")]))
    for sequence in ("ahead", "behind", "public"):
        engine.drop_caches(sequence)
    return torch.stack(rows)


def steps_of(engine: VllmEngine, draws: Sequence[Sequence[str]], patch: pytest.MonkeyPatch) -> list[Any]:
    """Returns all that vLLM does for these draws: the loads into slots; of each pass, the requests and their tokens."""
    steps: list[Any] = []
    first, execute, load = engine._started, ReaderRows.execute_model, AdapterSlots._load

    def executed(runner: Any, scheduled: Any, *others: Any) -> Any:
        output = execute(runner, scheduled, *others)
        loras = {key: each.lora_request and each.lora_request.lora_name for key, each in runner.requests.items()}
        steps.append([(int(key) - first, loras[key], count) for key, count in scheduled.num_scheduled_tokens.items()])
        return output

    def loaded(slots: AdapterSlots, adapter: int) -> None:
        steps.append(adapter)
        load(slots, adapter)

    with patch.context() as only:
        only.setattr(ReaderRows, "execute_model", executed)
        only.setattr(AdapterSlots, "_load", loaded)
        answered(engine, draws)
    engine._core.engine_core.scheduler.reset_prefix_cache()
    return steps


def test_a_cache_that_does_not_hold_one_sequence_is_refused(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_with(monkeypatch, num_gpu_blocks_override=18, block_size=128)
    with pytest.raises(ValueError, match=r"cache_gib: .* 6 caches, which need 18 blocks .* the cache has 17; raise"):
        create(settings)


def test_no_step_depends_on_the_draw(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = {name: steps_of(engine, draws, monkeypatch) for name, draws in DRAWS.items()}
    passes = [step for step in steps["empty"] if isinstance(step, list)]
    for name in NAMES:
        read = sum(count for step in passes for _, lora, count in step if lora == name)
        assert read >= 2 * LENGTHS[-1] + 90, "every part reads every token of both private sequences"
    for each in steps.values():
        assert each == steps["empty"]


@pytest.mark.parametrize("name", DRAWS)
def test_every_row_is_that_of_its_adapter_at_its_context(engine: VllmEngine, expected: Engine, name: str) -> None:
    rows = answered(engine, DRAWS[name])
    assert (rows - answered(expected, DRAWS[name])).abs().max() < 1e-3
    if name == "empty":
        assert torch.equal(rows[:, 1], rows[:, 0]), "the zero row is the public row, to the last bit"
    elif name != "late":
        assert (rows[:, 1] - rows[:, 0]).abs().amax(-1).min() > 0.1
