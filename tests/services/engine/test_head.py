"""Claim: logits in float32 are the sums of the head's products; which logits are in float32 follows the machine."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from transformers import AutoModelForCausalLM

from privmix.engine.engine import PUBLIC, ZERO, EngineSettings, Request, create
from privmix.engine.vllm_engine import _head_dtype
from tests.ensembles import write_adapters

TOKENS = tuple(torch.randint(1000, (30,), generator=torch.Generator().manual_seed(0)).tolist())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", "transformers"])
def test_float32_logits_are_not_rounded(kind: str, public_model: Path, adapters: dict[str, Path]) -> None:
    """A row of 49,152 logits in bfloat16 has few values, at steps of up to 1/8."""
    values = {}
    head_dtypes: tuple[Literal["model", "float32"], ...] = ("model", "float32")
    for head_dtype in head_dtypes:
        settings = EngineSettings(public_model, kind, context_length=64, head_dtype=head_dtype, adapters=adapters)
        engine = create(settings)
        rows = engine.next_token([Request("text", TOKENS, (PUBLIC, "first", ZERO))])
        engine.close()
        assert torch.allclose(rows.exp().sum(1), torch.ones(3), atol=1e-4)
        assert (rows[2] - rows[0]).abs().max() < 0.3, "the readers have the same head as the public row"
        values[head_dtype] = [len(row.unique()) for row in rows]
    assert max(values["model"]) < 5_000
    assert min(values["float32"]) > 40_000


def test_float32_logits_equal_a_product_in_float32(tiny: Path, tmp_path: Path) -> None:
    """In transformers, whose states before the head are at hand. The head's weights are the embedding's."""
    adapters = write_adapters(tmp_path, ("part",), tiny)
    settings = EngineSettings(tiny, "transformers", "bfloat16", 64, head_dtype="float32", adapters=adapters)
    rows = create(settings).next_token([Request("text", TOKENS, (PUBLIC,))])
    model = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16).eval()
    with torch.inference_mode():
        states = model.model(torch.tensor([TOKENS])).last_hidden_state[0, -1]
        expected = torch.log_softmax(states.float() @ model.lm_head.weight.float().T, -1)
    assert (rows[0] - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("head_dtype", "on_cpu", "batch_invariant", "expected"),
    [
        ("auto", True, "0", "model"),
        ("auto", False, "0", "float32"),
        ("auto", False, "1", "model"),
        ("model", False, "0", "model"),
        ("float32", True, "0", "float32"),
    ],
)
def test_logits_are_in_float32_where_it_costs_nothing(
    head_dtype: Any, on_cpu: bool, batch_invariant: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", batch_invariant)
    settings = EngineSettings(Path("model"), head_dtype=head_dtype)
    assert _head_dtype(settings, on_cpu) == expected


def test_float32_logits_are_refused_beside_batch_invariant_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match="head_dtype: no batch-invariant kernel gives float32 sums; use auto"):
        _head_dtype(EngineSettings(Path("model"), head_dtype="float32"), on_cpu=False)
