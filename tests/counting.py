"""Writes a model that counts, so that a client knows every token of a correct answer before it receives it.

The answer to the prompt `17` is ` 18 19 20`. A lost token is a gap, and a repeated text is a repetition. Each token is
one word, so a client counts tokens without the server.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

NUMBERS = 1000
"""The size of the vocabulary. The number after the last one is 0."""
WIDTH = 64
"""The largest similarity of two of `NUMBERS` random directions is about half of a direction's with itself."""


def write_counting_model(folder: Path) -> Path:
    """Writes a Llama of two layers whose distribution after a number is one number, up to float32's rounding.

    Its layers add nothing to the embeddings, and the output row of each number is the embedding of the number before.
    """
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(NUMBERS)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=NUMBERS,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    directions = torch.randn(NUMBERS, WIDTH)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(directions)
        model.lm_head.weight.copy_(directions.roll(1, dims=0))
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.save_pretrained(folder)
    return folder


def counted(start: int, tokens: int) -> list[int]:
    """Returns the correct answer of `tokens` tokens to the prompt `start`."""
    return [(start + step) % NUMBERS for step in range(1, tokens + 1)]


def counted_text(numbers: Sequence[int]) -> str:
    """Returns the text of an answer with these tokens."""
    return "".join(f" {number}" for number in numbers)
