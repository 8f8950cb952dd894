"""Claim: an adapter depends on its own tokens alone, and follows the gradient of its mean loss as a reader."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load
from torch import Tensor
from torch.nn.functional import cross_entropy

from privmix.engine.adapter_config import CONFIG_FILE, WEIGHTS_FILE
from privmix.engine.reader_attention import record
from privmix.foundation.errors import InputError
from privmix.training import adapter
from privmix.training.adapter import Files, train_adapter, with_lora
from privmix.training.options import TrainingOptions
from privmix.training.packing import Tokens

BLOCK = 16
OPTIONS = TrainingOptions(block=BLOCK, batch=2, epochs=3, learning_rate=1e-2, precision="float32")


def text(seed: int, length: int) -> Tokens:
    return np.random.default_rng(seed).integers(0, 500, length).astype(np.int32)


def trained(tiny: Path, tokens: Tokens, seed: int = 0, options: TrainingOptions = OPTIONS) -> Files:
    return train_adapter(tiny, "tiny", tokens, options, seed, lambda _: None)


def weights(files: Files) -> Tensor:
    return torch.cat([weight.flatten() for _, weight in sorted(load(files[WEIGHTS_FILE]).items())])


@pytest.mark.parametrize("part_kind", ["reader", "lora"])
def test_earlier_adapters_do_not_affect_an_adapter(tiny: Path, part_kind: Any) -> None:
    options = TrainingOptions.checked(**OPTIONS.model_dump(exclude={"targets"}) | {"part_kind": part_kind})
    alone = trained(tiny, text(1, 50), 1, options)
    for other in (text(2, 90), text(3, 5), text(4, 0)):
        trained(tiny, other, 2, options)
        assert trained(tiny, text(1, 50), 1, options) == alone
    assert trained(tiny, text(2, 50), 1, options) != alone
    assert trained(tiny, text(1, 50), 2, options) != alone


def test_stored_keys_and_values_equal_recomputed_ones(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = weights(trained(tiny, text(1, 100)))
    of_a_block = record(
        with_lora(tiny, "tiny", OPTIONS, torch.device("cpu")), torch.zeros(1, 15, dtype=torch.long)
    ).nbytes
    for room in (0, 2 * of_a_block):
        monkeypatch.setattr(adapter, "_KEPT_BYTES", room)
        torch.testing.assert_close(weights(trained(tiny, text(1, 100))), kept, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("layers", [1, 2])
def test_one_step_follows_the_gradient_of_the_mean_loss(tiny: Path, layers: int) -> None:
    """Adam's first step is the learning rate times the sign of the gradient, here by a pass through all layers."""
    tokens = text(1, 2 * BLOCK)
    options = OPTIONS.model_copy(update={"epochs": 1, "weight_decay": 0.0, "layers": layers})
    stepped = load(trained(tiny, tokens, 7, options)[WEIGHTS_FILE])
    start = load(trained(tiny, text(1, 0), 7, options)[WEIGHTS_FILE])
    torch.manual_seed(7)
    model = with_lora(tiny, "tiny", options, torch.device("cpu"))
    named = {name.replace(".default", ""): weight for name, weight in model.named_parameters() if weight.requires_grad}
    with torch.no_grad():
        for name, weight in named.items():
            weight.copy_(start[name])
    inputs = torch.from_numpy(tokens.astype(np.int64)).view(2, BLOCK)
    logits = model(input_ids=inputs, past_key_values=record(model, inputs).reader(BLOCK)).logits[:, :-1]
    cross_entropy(logits.flatten(0, 1), inputs[:, 1:].flatten()).backward()
    moved = 0
    for name, weight in named.items():
        assert weight.grad is not None
        if "lora_B" in name:  # the gradient of the other factor is 0 at the start
            certain = weight.grad.abs() > 1e-4
            moved += int(certain.sum())
            step = stepped[name] - start[name]
            torch.testing.assert_close(step[certain], -1e-2 * weight.grad.sign()[certain], atol=1e-4, rtol=1e-2)
    assert moved > 50


@pytest.mark.parametrize(("layers", "changed"), [(None, [1]), (1, [1]), (2, None)])
def test_an_adapter_has_weights_for_its_layers_only(tiny: Path, layers: int | None, changed: list[int] | None) -> None:
    """By default half of the two layers; `layers_to_transform` is PEFT's name."""
    files = trained(tiny, text(1, 20), options=OPTIONS.model_copy(update={"layers": layers}))
    assert json.loads(files[CONFIG_FILE])["layers_to_transform"] == changed
    present = {int(name.partition(".layers.")[2].partition(".")[0]) for name in load(files[WEIGHTS_FILE])}
    assert present == set(changed or (0, 1))


def test_more_layers_than_the_model_has_are_refused(tiny: Path) -> None:
    with pytest.raises(InputError, match="layers: must be at most the 2 of the public model, not 3"):
        trained(tiny, text(1, 20), options=OPTIONS.model_copy(update={"layers": 3}))


def test_keys_and_values_of_a_reader_are_refused(tiny: Path) -> None:
    with pytest.raises(InputError, match=r"targets: a reader has no keys and values .* leave out v_proj"):
        trained(tiny, text(1, 20), options=OPTIONS.model_copy(update={"targets": ("q_proj", "v_proj")}))


def test_weights_are_not_rounded_to_bfloat16(tiny: Path) -> None:
    files = load(
        trained(tiny, text(1, 200), options=OPTIONS.model_copy(update={"precision": "bfloat16"}))[WEIGHTS_FILE]
    )
    first = torch.cat([weight.flatten() for name, weight in files.items() if "lora_A" in name])
    assert first.dtype == torch.float32
    assert (first != first.bfloat16().float()).float().mean() > 0.9


def test_text_shorter_than_a_block_is_not_padded(tiny: Path) -> None:
    longer = OPTIONS.model_copy(update={"block": 64})
    assert weights(trained(tiny, text(1, 10), options=longer)).equal(weights(trained(tiny, text(1, 10))))
