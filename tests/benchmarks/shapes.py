"""Writes models and readers of known shapes with random weights, in seconds and without downloads, to measure speed.

transformers and PEFT are imported where they are used: their import takes seconds.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import Tensor

from privmix.training.options import READER_TARGETS

if TYPE_CHECKING:
    from transformers import LlamaConfig

RANK = 16
STRENGTH = 0.03
"""The standard deviation of the second LoRA factor, with which readers differ by far more than rounding errors."""
SPREAD = 0.05
"""The standard deviation of the layers' weights."""
NUMBERS = 2**22 - 3
"""How many random numbers the weights repeat: no row of a matrix equals another."""
STEEPNESS = 0.15
"""The standard deviation of the embeddings, and so of the head, with which distributions are far from uniform."""


@dataclass(frozen=True)
class Shape:
    """Describes a Llama model. `readers` is the number of last layers that readers change."""

    layers: int
    readers: int
    hidden: int
    heads: int
    key_heads: int
    intermediate: int
    vocabulary: int
    tied: bool
    context: int = 8192

    @property
    def head_size(self) -> int:
        return self.hidden // self.heads

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """Returns the inputs and outputs of each module that readers change."""
        attention = self.heads * self.head_size
        sizes = {
            "self_attn.q_proj": (self.hidden, attention),
            "self_attn.o_proj": (attention, self.hidden),
            "mlp.gate_proj": (self.hidden, self.intermediate),
            "mlp.up_proj": (self.hidden, self.intermediate),
            "mlp.down_proj": (self.intermediate, self.hidden),
        }
        return {name: size for name, size in sizes.items() if name.rpartition(".")[2] in READER_TARGETS}

    @property
    def config(self) -> "LlamaConfig":
        from transformers import LlamaConfig

        return LlamaConfig(
            architectures=["LlamaForCausalLM"],
            dtype=torch.bfloat16,
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.key_heads,
            max_position_embeddings=self.context,
            tie_word_embeddings=self.tied,
            initializer_range=SPREAD,
        )


SHAPES = {
    "tiny": Shape(4, 2, 64, 2, 1, 128, 512, tied=True, context=1024),
    "SmolLM2-135M": Shape(30, 15, 576, 9, 3, 1536, 49152, tied=True),
    "Llama-8B": Shape(32, 16, 4096, 32, 8, 14336, 128256, tied=False),
}


def write_model(folder: Path, shape: Shape, *, weights: bool = True) -> Path:
    """Writes a model without a tokenizer; without weights, its configuration alone, for engines that make their own.

    All weights repeat the same numbers, because it takes minutes to draw 8B.
    """
    shape.config.save_pretrained(folder)
    if weights:
        from transformers import LlamaForCausalLM

        noise = torch.randn(NUMBERS, generator=torch.Generator().manual_seed(0))
        with torch.device("meta"):
            parameters = dict(LlamaForCausalLM(shape.config).named_parameters())
        tensors = {name: _weights(name, values.shape, noise) for name, values in parameters.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _weights(name: str, size: torch.Size, noise: Tensor) -> Tensor:
    if len(size) == 1:
        return torch.ones(size, dtype=torch.bfloat16)  # of a norm
    scaled = (noise * (STEEPNESS if "embed" in name else SPREAD)).bfloat16()
    return scaled.repeat(-(-size.numel() // NUMBERS))[: size.numel()].view(size)


def write_readers(folder: Path, names: Sequence[str], shape: Shape, distinct: int | None = None) -> dict[str, Path]:
    """Writes readers of a shape, of which the first `distinct`, by default all, are different.

    The others are links to their files, but engines load each of them.
    """
    from peft import LoraConfig

    layers = list(range(shape.layers - shape.readers, shape.layers))
    config = LoraConfig(
        r=RANK,
        lora_alpha=2 * RANK,
        target_modules=list(READER_TARGETS),
        layers_to_transform=layers,
        task_type="CAUSAL_LM",
    )
    written = names[:distinct]
    for seed, name in enumerate(written):
        generator = torch.Generator().manual_seed(seed)
        tensors: dict[str, Tensor] = {}
        for layer in layers:
            for module, (inputs, outputs) in shape.modules.items():
                place = f"base_model.model.model.layers.{layer}.{module}"
                a = torch.empty(RANK, inputs, dtype=torch.bfloat16).normal_(std=inputs**-0.5, generator=generator)
                b = torch.empty(outputs, RANK, dtype=torch.bfloat16).normal_(std=STRENGTH, generator=generator)
                tensors |= {f"{place}.lora_A.weight": a, f"{place}.lora_B.weight": b}
        config.save_pretrained(folder / name)
        save_file(tensors, folder / name / "adapter_model.safetensors", metadata={"format": "pt"})
    for index, name in enumerate(names[len(written) :]):
        shutil.copytree(folder / written[index % len(written)], folder / name, copy_function=os.link)
    return {name: folder / name for name in names}
