"""Claim: the readers of a sequence are one query without a causal mask where the backend can, and the rows are equal.

vLLM runs eagerly on a CPU, so one pass runs the readers beside the public tokens, whose queries keep the mask. The pass
of a GPU is run here too, in vLLM's CPU backend.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from privmix.engine.engine import PUBLIC, ZERO, EngineSettings, Request
from privmix.engine.reader_rows import ReaderRows
from privmix.engine.vllm_engine import VllmEngine
from tests.ensembles import write_adapters
from tests.tiny import write_tiny_llama

NAMES = ("first", "second", "third")
TOKENS = tuple(torch.randint(128, (40,), generator=torch.Generator().manual_seed(0)).tolist())
REQUESTS = (
    Request("long", TOKENS[:33], (PUBLIC, "first", "second", ZERO)),
    Request("alone", TOKENS[:9], (PUBLIC,)),
    Request("short", TOKENS[:20], ("third", "first")),
)
MODES = {"together": (True, True), "together, each": (True, False), "shared": (False, True), "each": (False, False)}
"""Whether one pass runs all, and whether the backend can do without a causal mask."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(folder / "model", layers=3, context=64)
    adapters = write_adapters(folder / "adapters", NAMES, folder / "model", layers=2)
    built = VllmEngine(EngineSettings(folder / "model", "vllm", "float32", 64, cache_gib=1, adapters=adapters))
    yield built
    built.close()


def rows_of(engine: VllmEngine, mode: str) -> torch.Tensor:
    together, can_share = MODES[mode]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReaderRows, "_runs_together", together)
        if not can_share:
            patch.setattr(ReaderRows, "_queries_are_shared", lambda *_: False)
        rows = engine.next_token(REQUESTS)
    for request in REQUESTS:
        engine.drop_caches(request.sequence)
    return rows


def test_rows_are_equal_in_each_kind_of_query(engine: VllmEngine) -> None:
    rows = {mode: rows_of(engine, mode) for mode in MODES}
    for mode in MODES:
        assert (rows[mode] - rows["each"]).abs().max() < 1e-4
    assert (rows["each"][1] - rows["each"][2]).abs().max() > 0.1, "the adapters differ"


def shares(
    backend: Any, window: Any = None, text_tokens: int = 0, *, together: bool = False, device: str = "cuda"
) -> bool:
    """Returns whether readers share a query in a model of one layer."""
    layer = SimpleNamespace(impl=SimpleNamespace(sliding_window=window))
    runner = ReaderRows()
    runner.compilation_config = SimpleNamespace(static_forward_context={"layer": layer})
    runner.attn_groups = [[SimpleNamespace(backend=backend)]]
    runner._text_tokens = text_tokens
    runner.device = torch.device(device)
    return runner._queries_are_shared(together)


def without_mask(possible: bool) -> Any:
    return SimpleNamespace(supports_non_causal=lambda: possible, get_name=lambda: "SOME")


@pytest.mark.parametrize(("device", "shared"), [("cpu", True), ("cuda", False)])
def test_layers_without_a_window_share_queries_and_beside_public_tokens_on_a_cpu(device: str, shared: bool) -> None:
    """Not all of a GPU's backends take a mask for each query."""
    for none in (None, -1, (-1, -1)):
        assert shares(without_mask(True), none)
    assert shares(without_mask(True), together=True, device=device) is shared


def test_windows_texts_and_backends_with_masks_have_a_query_for_each_reader() -> None:
    """A window counts from the end of a query, and each text is a sequence of its own."""
    assert not shares(without_mask(False))
    assert not shares(SimpleNamespace(supports_non_causal=lambda: True, get_name=lambda: "FLASHINFER"))
    assert not shares(without_mask(True), window=(15, 0))
    assert not shares(without_mask(True), text_tokens=32)
    assert not shares(without_mask(True), text_tokens=32, together=True, device="cpu")
