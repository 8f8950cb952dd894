"""Claim: a reader in transformers uses the public model's keys and values, and its adapter for everything else."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from privmix.engine.engine import PUBLIC
from privmix.engine.reader_attention import PublicCache, check_reader, record, record_text
from privmix.engine.switching import using
from privmix.foundation.errors import ReaderError
from privmix.training.options import READER_TARGETS
from tests.services.engine.masked import after_text
from tests.support.random_models import random_model

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
WINDOW = {"sliding_window": 6}
MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen3": ("qwen3", {}),
    "mistral, window of 6": ("mistral", WINDOW),
    "gemma3, both kinds of layer": (
        "gemma3_text",
        {**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
}


def adapted(model: Any, strength: float) -> Any:
    torch.manual_seed(1)
    wrapped = get_peft_model(model, LoraConfig(r=4, lora_alpha=16, target_modules=list(READER_TARGETS)), "part")
    for name, weight in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=strength)
    return wrapped.eval()


@pytest.fixture(params=[pytest.param("smollm2", marks=pytest.mark.slow), *MADE])
def model(request: pytest.FixtureRequest, public_model: Path) -> Any:
    if request.param == "smollm2":
        return adapted(AutoModelForCausalLM.from_pretrained(public_model, dtype=torch.float32), 0.03)
    return made(request.param)


def made(name: str) -> Any:
    torch.manual_seed(0)
    kind, described = MADE[name]
    return adapted(random_model(kind, **SMALL, **described), 0.3)


@pytest.fixture(scope="module")
def llama() -> Any:
    return made("llama")


def sequences(model: Any, length: int = 20) -> Tensor:
    return torch.randint(model.config.vocab_size, (2, length), generator=torch.Generator().manual_seed(3))


def read(model: Any, tokens: Tensor, cache: PublicCache, positions: int) -> Tensor:
    with using(model, "part"):
        logits: Tensor = model(input_ids=tokens[:, -positions:], past_key_values=cache.reader(positions)).logits
    return logits


@pytest.fixture
def by_projections() -> Iterator[Callable[[Any, Tensor], Tensor]]:
    """A reference implementation: hooks replace the outputs of k_proj and v_proj in every layer by the public model's.

    It uses no cache, so masks and positions are those of a plain forward pass.
    """
    handles: list[Any] = []

    def run(model: Any, tokens: Tensor) -> Tensor:
        kept: dict[str, Tensor] = {}
        replacing = False

        def hook(name: str) -> Callable[[Any, Any, Tensor], Tensor]:
            def observe(_module: Any, _inputs: Any, output: Tensor) -> Tensor:
                return kept[name] if replacing else kept.setdefault(name, output)

            return observe

        for name, module in model.named_modules():
            if name.endswith(("k_proj", "v_proj")):
                handles.append(module.register_forward_hook(hook(name)))
        with using(model, PUBLIC):
            model(input_ids=tokens, use_cache=False)
        replacing = True
        with using(model, "part"):
            logits: Tensor = model(input_ids=tokens, use_cache=False).logits
        return logits

    yield run
    for handle in handles:
        handle.remove()


@torch.inference_mode()
def test_reader_attends_to_public_keys_and_values(model: Any, by_projections: Any) -> None:
    tokens = sequences(model)
    rows = read(model, tokens, record(model, tokens), tokens.shape[1])
    with using(model, "part"):
        own = model(input_ids=tokens, use_cache=False).logits
    assert (rows - own).abs().max() > 0.1
    torch.testing.assert_close(rows, by_projections(model, tokens), atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_one_position_against_a_cache_that_grows(model: Any) -> None:
    tokens = sequences(model)
    everywhere = read(model, tokens, record(model, tokens), tokens.shape[1])
    cache = PublicCache()
    for length in (9, 12, 13, 20):
        record(model, tokens[:, cache.get_seq_length() : length], cache)
        for positions in (1, 3, 1):  # a read does not change the cache
            some = read(model, tokens[:, :length], cache, positions)
            torch.testing.assert_close(some, everywhere[:, length - positions : length], atol=1e-3, rtol=1e-3)
        assert cache.get_seq_length() == length
    cache.crop(-8)
    record(model, tokens[:, 12:20], cache)
    torch.testing.assert_close(read(model, tokens, cache, 1), everywhere[:, -1:], atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_a_text_comes_before_every_sequence(model: Any) -> None:
    """All positions of a block equal each of them alone, also in windows, and a plain pass with a mask."""
    text = torch.randint(model.config.vocab_size, (5,), generator=torch.Generator().manual_seed(5))
    tokens, states = sequences(model), record_text(model, text)
    with using(model, PUBLIC):
        cache = record(model, tokens)
        everywhere = model(input_ids=tokens, past_key_values=cache.reader(20, states)).logits
        if getattr(model.config, "sliding_window", None) is None:
            expected = torch.stack([after_text(model, text, sequence) for sequence in tokens])
            torch.testing.assert_close(everywhere, expected, atol=1e-3, rtol=1e-3)
        assert (everywhere - model(input_ids=tokens, use_cache=False).logits).abs().max() > 0.05
        for length in (1, 2, 11, 20):
            cache = record(model, tokens[:, :length])
            row = model(input_ids=tokens[:, length - 1 : length], past_key_values=cache.reader(1, states)).logits
            torch.testing.assert_close(row, everywhere[:, length - 1 : length], atol=1e-3, rtol=1e-3)


@torch.inference_mode()
def test_caches_of_single_sequences_can_be_batched(llama: Any) -> None:
    tokens = sequences(llama)
    cache = record(llama, tokens)
    first, second = cache.split()
    assert first.nbytes == second.nbytes == cache.nbytes / 2
    swapped = PublicCache.stack([second, first])
    assert torch.equal(read(llama, tokens.flip(0), swapped, 20), read(llama, tokens, cache, 20).flip(0))


def test_a_cache_view_refuses_other_positions(llama: Any) -> None:
    tokens = sequences(llama)
    cache = record(llama, tokens)
    with pytest.raises(ReaderError, match="got 21, but the public model has read 20"):
        cache.reader(21)
    with pytest.raises(ReaderError, match="the view is for 3, but the pass has 2"):
        llama(input_ids=tokens[:, -2:], past_key_values=cache.reader(3))


def test_models_without_readers_are_refused_with_the_reason(llama: Any) -> None:
    check_reader(llama, READER_TARGETS)
    with pytest.raises(ReaderError, match=r"keys and values of its own: leave out k_proj, v_proj$"):
        check_reader(llama, ("q_proj", "v_proj", "k_proj"))
    gpt2 = random_model("gpt2", vocab_size=64, n_embd=32, n_layer=2, n_head=2)
    with pytest.raises(ReaderError, match=r"no modules named down_proj, gate_proj, o_proj, q_proj, up_proj$"):
        check_reader(gpt2, READER_TARGETS)
    check_reader(gpt2, ("c_proj", "c_fc"))  # GPT-2 can have readers with its own target modules
    with pytest.raises(ReaderError, match="needs rotary positions, which gpt2 has not"):
        record_text(gpt2, torch.zeros(4, dtype=torch.long))
    mamba = random_model("mamba", vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=4)
    with pytest.raises(ReaderError, match="mamba puts none into transformers' cache in all layers"):
        check_reader(mamba, ("in_proj",))
