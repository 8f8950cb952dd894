"""Claim: a captured decode step computes the rows that the engine computes without graphs.

A stand-in for CUDA graphs records a step of a CPU engine, and repeats it with other tokens, lengths, draws and numbers
of sequences than those of the capture.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch

from privmix.engine.engine import PUBLIC, ZERO, EngineSettings, Request
from privmix.engine.step_graph import StepShape
from privmix.engine.vllm_engine import VllmEngine
from tests.ensembles import write_adapters
from tests.services.engine.fake_graph import capture_on_a_cpu, recorded_steps
from tests.services.engine.vllm_starts import start_with
from tests.tiny import write_tiny_llama

NAMES = tuple(f"part-{index}" for index in range(5))
READERS = 3
CONTEXT = 96


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(folder / "model", layers=3, context=CONTEXT)
    adapters = write_adapters(folder / "adapters", NAMES, folder / "model", layers=2)
    return EngineSettings(folder / "model", "vllm", "float32", CONTEXT, cache_gib=1, adapters=adapters, rows=READERS)


Answers = list[torch.Tensor]


def decoded(engine: VllmEngine) -> Answers:
    """Returns the rows of steps of changing batches, draws and lengths, with tokens that a grammar forces."""
    generator = np.random.default_rng(0)
    contexts = {f"text-{index}": generator.integers(128, size=3 + 5 * index).tolist() for index in range(7)}
    answers = []
    for step in range(9):
        asked = [name for index, name in enumerate(contexts) if (step + index) % 4]
        private = asked[: len(asked) - step % 3]
        requests = [
            Request(name, tuple(contexts[name]), (PUBLIC, *_draw(generator)) if name in private else (PUBLIC,))
            for name in asked
        ]
        answers.append(engine.logits(requests).clone())
        for name in asked:
            forced = 1 + (step + len(name)) % 3 if step % 4 == 3 else 1
            contexts[name] += generator.integers(128, size=forced).tolist()
        if step == 5:
            engine.drop_caches("text-1")
    for name in contexts:
        engine.drop_caches(name)
    return answers


def _draw(generator: np.random.Generator) -> tuple[str, ...]:
    drawn = generator.permutation(len(NAMES))[: generator.integers(1, READERS + 1)]
    return tuple(NAMES[part] for part in sorted(drawn)) + (ZERO,) * (READERS - len(drawn))


BESIDE = (
    Request("first", (1, 2, 3), (PUBLIC, *NAMES[:2])),
    Request("second", (3, 2, 1), (PUBLIC, *NAMES[2:4])),
    Request("public", (4, 5), (PUBLIC,)),
)


@pytest.fixture(scope="module")
def expected(settings: EngineSettings) -> tuple[Answers, torch.Tensor]:
    """The rows of `decoded` and of `BESIDE` without graphs."""
    engine = VllmEngine(settings)
    assert not engine._captured
    rows = decoded(engine), engine.logits(BESIDE).clone()
    engine.close()
    return rows


class Repeated:
    """Implements `step_graph.Graph` by running the function again."""

    def capture(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        self._function = function
        self._output = function()
        return self._output

    def replay(self) -> None:
        with torch.inference_mode():
            self._output.copy_(self._function())


@pytest.fixture
def captured(settings: EngineSettings, monkeypatch: pytest.MonkeyPatch) -> Iterator[VllmEngine]:
    capture_on_a_cpu(monkeypatch)
    engine = VllmEngine(settings)
    yield engine
    engine.close()


def test_public_requests_beside_private_ones_take_no_slot(
    settings: EngineSettings, expected: tuple[Answers, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with as many drawn adapters as slots has none for the padding, whose rows nobody reads."""
    start_with(monkeypatch, max_loras=4)
    capture_on_a_cpu(monkeypatch, Repeated)
    engine = VllmEngine(replace(settings, rows=2))
    assert engine._captured == {0, 2}
    assert (engine.logits(BESIDE) - expected[1]).abs().max() < 1e-4
    engine.close()


def test_room_for_new_tokens_is_made_at_the_cost_of_no_sequence_of_the_same_step(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture_on_a_cpu(monkeypatch, Repeated)
    start_with(monkeypatch, num_gpu_blocks_override=9, block_size=32)
    engine = VllmEngine(replace(settings, rows=2))

    def ask(*asked: tuple[str, int]) -> None:
        texts = {name: tuple(np.random.default_rng(ord(name)).integers(128, size=length)) for name, length in asked}
        engine.logits(
            [Request(name, tuple(map(int, text)), (PUBLIC, *NAMES[:2]), name) for name, text in texts.items()]
        )

    ask(("a", 80))
    ask(("b", 80))
    steps = recorded_steps(monkeypatch)
    before = engine._worker("tokens_computed")
    ask(("a", 81), ("c", 80))
    assert engine._worker("tokens_computed") - before == 1 + 80
    assert steps == [StepShape(2, 2)]
    assert {name for name, _ in engine._sessions} == {"a", "c"}
    engine.close()


def test_a_captured_step_computes_the_rows_of_one_without_graphs(
    expected: tuple[Answers, torch.Tensor], captured: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = recorded_steps(monkeypatch)
    assert captured._captured == {0, READERS}
    for answer, rows in zip(decoded(captured), expected[0], strict=True):
        assert (answer.log_softmax(-1).exp() - rows.log_softmax(-1).exp()).abs().max() < 1e-4
    assert {shape.readers for shape in shapes} == {0, READERS}
    assert len({shape.sequences for shape in shapes}) > 1, "batches of several sizes were replayed"
