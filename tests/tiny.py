"""Writes tiny models, which train and answer in milliseconds."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from privmix.training.public_model import resolve

WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_key_value_heads": 1, "initializer_range": 0.2}


def write_tiny_model(folder: Path, context: int = 128) -> Path:
    """Writes a random model of two layers and 16 dimensions, whose distributions are far from uniform.

    It has the embedded model's tokenizer.
    """
    return _write_llama(
        folder,
        vocab_size=copy_tokenizer(folder),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.5,
    )


def write_served_model(folder: Path, context: int) -> Path:
    """Writes a random model that vLLM runs on a CPU, with the embedded model's tokenizer and chat template."""
    return write_tiny_llama(folder, layers=2, context=context, vocabulary=copy_tokenizer(folder))


def copy_tokenizer(folder: Path) -> int:
    """Copies the embedded model's tokenizer into a new folder, and returns the size of the vocabulary."""
    base = resolve()
    folder.mkdir(parents=True)
    for file in base.iterdir():
        if file.suffix in (".json", ".jinja", ".txt") and file.name != "config.json":
            shutil.copy(file, folder)
    return int(json.loads((base / "config.json").read_bytes())["vocab_size"])


def write_tiny_llama(folder: Path, *, layers: int, context: int, vocabulary: int = 128) -> Path:
    """Writes a random Llama of 64 dimensions and one key head, without a tokenizer."""
    return _write_llama(
        folder, vocab_size=vocabulary, num_hidden_layers=layers, max_position_embeddings=context, **WIDE
    )


def _write_llama(folder: Path, **described: Any) -> Path:
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(num_attention_heads=2, **described)).save_pretrained(folder)
    return folder


def write_mixture_of_experts(folder: Path) -> Path:
    """Writes a random Qwen3-MoE of two layers, four experts and a vocabulary of 128."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=128,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        **WIDE,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder
