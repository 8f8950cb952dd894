"""Claim: both engines run readers on any decoder with q, o and MLP projections, and refuse other models by name."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from privmix.engine.engine import PUBLIC, ZERO, EngineSettings, Request, create
from privmix.engine.part_text import text_files
from privmix.engine.reader_rows import refuse_unknown_family, refuse_unsupported_features
from privmix.engine.step_graph import StepShape
from privmix.foundation.files import write_files
from tests.ensembles import write_adapters
from tests.services.engine.fake_graph import capture_on_a_cpu, recorded_steps
from tests.services.training.test_families import FAMILIES as TRAINED
from tests.services.training.test_families import family
from tests.support.random_models import random_model
from tests.tiny import write_mixture_of_experts

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen2": ("qwen2", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window of 16": ("mistral", {"sliding_window": 16}),
}
TOKENS = tuple(torch.randint(0, 128, (90,), generator=torch.Generator().manual_seed(0)).tolist())


def check_same_rows(settings: EngineSettings) -> None:
    """Compares vLLM's rows of the parts `first` and `second` with those of transformers."""
    engines = [create(settings), create(replace(settings, kind="transformers"))]
    for length in (20, 21, 60):
        request = Request("family", TOKENS[:length], (PUBLIC, "first", ZERO, "second"))
        rows, expected = (engine.next_token([request]) for engine in engines)
        assert (rows.exp() - expected.exp()).abs().max() < 1e-4
        assert (rows[1] - rows[0]).abs().max() > 0.1
    for engine in engines:
        engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_both_engines_give_the_same_answers(
    family: str, captured: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Also with captured steps, except for layers with a window, which are named in a warning."""
    torch.manual_seed(0)
    kind, described = FAMILIES[family]
    random_model(kind, **SIZES, **described).save_pretrained(tmp_path / "model")
    adapters = write_adapters(tmp_path / "adapters", ("first", "second"), tmp_path / "model")
    settings = EngineSettings(tmp_path / "model", "vllm", "float32", 128, cache_gib=1, adapters=adapters, rows=3)
    replayed = recorded_steps(monkeypatch)
    if captured:
        capture_on_a_cpu(monkeypatch)
    check_same_rows(settings)
    windows = "window" in family
    assert replayed == ([StepShape(1, 3)] * 3 if captured and not windows else [])
    assert ("steps are not captured" in caplog.text and "layers with a window" in caplog.text) == (captured and windows)


@pytest.mark.parametrize("name", TRAINED)
def test_plain_lora_parts_of_every_family_answer_like_peft(name: str, tmp_path: Path) -> None:
    """Also a part that was not drawn for some tokens."""
    model, options = family(name, tmp_path / "model")
    adapters = write_adapters(tmp_path, ("first", "second"), model, targets=options.targets)
    engine = create(EngineSettings(model, "transformers", "float32", 64, part_kind="lora", adapters=adapters))
    tokens = [token % 64 for token in TOKENS[:40]]
    rows = {}
    for part, path in adapters.items():
        plain: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), path)
        rows[part] = plain.eval()(torch.tensor([tokens])).logits[0].log_softmax(-1)
    assert (rows["first"] - rows["second"]).abs().max() > 0.01
    for length, names in ((20, ("first", ZERO)), (21, (ZERO, ZERO)), (22, ("second", "first")), (40, ("second", ZERO))):
        answer = engine.next_token([Request("family", tokens[:length], (PUBLIC, *names))])
        for part, row in zip(names, answer[1:], strict=True):
            assert (row - (answer[0] if part == ZERO else rows[part][length - 1])).abs().max() < 1e-4
    engine.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them")
def test_adapters_of_a_mixture_of_experts_are_refused_on_a_cpu(tmp_path: Path) -> None:
    model = write_mixture_of_experts(tmp_path / "model")
    adapters = write_adapters(tmp_path, ("part",), model, targets=("q_proj", "o_proj"))
    settings = EngineSettings(model, "vllm", "bfloat16", 128, cache_gib=1, adapters=adapters)
    with pytest.raises(ValueError, match="adapters of a mixture-of-experts model on a GPU only"):
        create(settings)


@pytest.mark.slow
@pytest.mark.parametrize("together", [True, False])
def test_rows_of_a_mixture_of_experts_have_their_experts(
    together: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a pass of their own. The parts are texts, because vLLM's experts on a CPU do not run beside adapters."""
    model = write_mixture_of_experts(tmp_path / "model")
    for name, tokens in {"first": TOKENS[:40], "second": TOKENS[40:]}.items():
        write_files(tmp_path / name, text_files(np.array(tokens, np.int32), 128))
    adapters = {name: tmp_path / name for name in ("first", "second")}
    settings = EngineSettings(model, "vllm", "float32", 128, cache_gib=1, part_kind="text", adapters=adapters)
    monkeypatch.setattr("privmix.engine.reader_rows.ReaderRows._runs_together", together)
    check_same_rows(settings)


@pytest.mark.parametrize(
    ("file", "name", "runs"),
    [
        ("llama", "LlamaModel", True),
        ("mistral", "MistralModel", True),
        ("qwen2", "Qwen2Model", True),
        ("qwen3", "Qwen3Model", True),
        ("qwen3_moe", "Qwen3MoeModel", True),
        ("glm4", "Glm4Model", False),
        ("llama4", "Llama4Model", False),
        ("gemma3", "Gemma3Model", False),
        ("deepseek_v2", "DeepseekV2Model", False),
    ],
)
def test_vllm_runs_readers_only_on_families_that_were_compared(file: str, name: str, runs: bool) -> None:
    """A family whose loop over layers differs, such as one with latent attention, would be silently wrong."""
    model = getattr(import_module(f"vllm.model_executor.models.{file}"), name)
    instance = SimpleNamespace(model=model.__new__(model))
    if runs:
        refuse_unknown_family(instance)
        return
    with pytest.raises(ValueError, match=r"model: vLLM does not run .* with parts; use llama"):
        refuse_unknown_family(instance)


def runner(**changes: Any) -> Any:
    """Returns what `refuse_unsupported_features` reads of a model runner; `changes` name fields of its parts."""
    parallel = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "data_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "use_ubatching": False,
    }
    model, lora = {"use_mla": False, "is_moe": False}, {"specialize_active_lora": False}
    for part in (parallel, model, lora):
        part |= {name: value for name, value in changes.items() if name in part}
    return SimpleNamespace(
        supports_mm_inputs=False,
        uses_mrope=False,
        speculative_config=None,
        model_config=SimpleNamespace(**model),
        vllm_config=SimpleNamespace(parallel_config=SimpleNamespace(**parallel), lora_config=SimpleNamespace(**lora)),
    )


@pytest.mark.parametrize(
    ("changes", "feature"),
    [
        ({"use_mla": True}, "latent attention"),
        ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
        ({"tensor_parallel_size": 2, "is_moe": True}, "adapters of a mixture-of-experts model over several devices"),
        ({"specialize_active_lora": True}, "specialize_active_lora"),
    ],
)
def test_a_feature_that_makes_rows_wrong_is_refused(changes: dict[str, Any], feature: str) -> None:
    refuse_unsupported_features(runner())
    with pytest.raises(ValueError, match=f"readers do not run with .*{feature}"):
        refuse_unsupported_features(runner(**changes))
