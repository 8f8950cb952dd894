"""Claim: of each family of models, one user moves DP-SGD's sum by what it adds alone, and a text changes no other part.

The models are tiny and random. Each has dropout of its own, and router noise where its family knows it.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import dropout
from transformers.models.llama import modeling_llama

from privmix.foundation.errors import InputError
from privmix.privacy.sampling.clipping import GRAINS
from privmix.training import determinism, per_unit
from privmix.training.adapter import train_adapter, with_lora
from privmix.training.options import READER_TARGETS, TrainingOptions
from privmix.training.packing import Tokens
from tests.support.random_models import random_model

CPU, BLOCK, CLIP = torch.device("cpu"), 16, 1e-3
SMALL = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "attention_dropout": 0.1, "pad_token_id": 0,
    "initializer_range": 0.2,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"vocab_size": 64, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "initializer_range": 0.2},
    "llama": SMALL,
    "mistral": SMALL | {"sliding_window": 8},
    "qwen2": SMALL,
    "qwen3": SMALL | {"head_dim": 16},
    "gemma2": SMALL | {"head_dim": 16},
    "gemma3_text": SMALL | {"head_dim": 16},
    "phi": SMALL | {"resid_pdrop": 0.1, "embd_pdrop": 0.1},
    "phi3": SMALL | {"resid_pdrop": 0.1, "embd_pdrop": 0.1},
    "mixtral": SMALL | EXPERTS | {"router_jitter_noise": 0.1},
    "qwen3_moe": SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16},
    "granitemoe": SMALL | EXPERTS,
    "phimoe": SMALL | EXPERTS | {"router_jitter_noise": 0.1, "input_jitter_noise": 0.1},
}
TARGETS = {"gpt2": "c_attn", "phi3": "qkv_proj"}
"""The modules that adapters change, where it is not `v_proj`."""


def family(name: str, folder: Path) -> tuple[Path, TrainingOptions]:
    torch.manual_seed(0)
    random_model(name, **FAMILIES[name]).save_pretrained(folder)
    targets = (TARGETS.get(name, "v_proj"),)
    return folder, TrainingOptions(part_kind="lora", targets=targets, block=BLOCK, precision="float32")


def users(count: int, seed: int = 0) -> list[Tokens]:
    random = np.random.default_rng(seed)
    return [random.integers(1, 64, random.integers(3, 3 * BLOCK)).astype(np.int32) for _ in range(count)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_user_moves_the_sum_by_what_it_adds_alone(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, options = family(name, tmp_path)
    sums: list[Tensor] = []

    def spied(total: Tensor, multiplier: float) -> Tensor:
        sums.append(total)
        return total.double() * multiplier

    monkeypatch.setattr(per_unit, "noised", spied)
    some = users(40)
    for of in (some, some[1:], some[:1]):
        per_unit.train_adapter(
            *(base, name, of, options, 0, lambda _: None), noise_multiplier=0.0, sampling_rate=1.0, steps=1, clip=CLIP
        )
    together, without, alone = sums
    assert torch.equal(together - without, alone)
    assert 0.99 * GRAINS < math.isqrt(sum(int(grain) ** 2 for grain in alone)) <= GRAINS


@pytest.mark.parametrize("name", FAMILIES)
def test_a_part_depends_on_no_other(name: str, tmp_path: Path) -> None:
    base, options = family(name, tmp_path)
    tokens, other = users(2)

    def trained(text: Tokens) -> Any:
        return train_adapter(base, name, text, options.model_copy(update={"epochs": 1}), 0, lambda _: None)

    alone = trained(tokens)
    assert trained(other) != alone
    assert trained(tokens) == alone


REFUSED_READERS = {
    "gpt2": "model mine: readers change the layers of models that are built like Llama",
    "phi": "targets: the model has no modules named .*o_proj",
    "phi3": "targets: the model has no modules named .*q_proj",
}


@pytest.mark.parametrize("name", REFUSED_READERS)
def test_a_family_without_readers_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    base, options = family(name, tmp_path)
    readers = options.model_copy(update={"part_kind": "reader", "targets": READER_TARGETS})
    with pytest.raises(InputError, match=REFUSED_READERS[name]):
        with_lora(base, "mine", readers, CPU)


def draws(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    """The planted fault: dropout that no mode and no configuration switches off."""
    return dropout(output, 0.5, training=True)


def remembers(module: nn.Module, _: Any, output: Tensor) -> Tensor:
    """The planted fault: the pass of a longer text changes all later ones."""
    longest = module.__dict__["longest"] = max(module.__dict__.get("longest", 1), output.shape[1])
    return output * longest


@pytest.mark.parametrize(("fault", "problem"), [(draws, "draws random numbers"), (remembers, "keeps a state")])
def test_a_model_that_is_not_a_function_of_the_row_is_refused(fault: Any, problem: str, tmp_path: Path) -> None:
    model = determinism.load(family("llama", tmp_path)[0], torch.float32, None)
    determinism.check(model)
    model.get_decoder().layers[0].mlp.register_forward_hook(fault)
    with pytest.raises(InputError, match=f"model: {problem}"):
        determinism.check(model)


def test_statistics_of_a_batch_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "LlamaRMSNorm", lambda size, eps: nn.BatchNorm1d(size))
    with pytest.raises(InputError, match=r"its module model\.layers\.0\..* normalises by the statistics of a batch"):
        determinism.load(family("llama", tmp_path)[0], torch.float32, None)
