"""Writes a tiny model with the embedded model's tokenizer, which trains and answers in milliseconds."""

import json
import shutil
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from services.training.public_model import resolve


def write_tiny_model(folder: Path, context: int = 128) -> Path:
    """Writes a random model of two layers and 16 dimensions, whose distributions are far from uniform."""
    base = resolve()
    folder.mkdir(parents=True)
    for file in base.iterdir():
        if file.suffix in (".json", ".txt") and file.name != "config.json":
            shutil.copy(file, folder)
    vocabulary = json.loads((base / "config.json").read_bytes())["vocab_size"]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=0.5,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
