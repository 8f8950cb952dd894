"""Changes how engines of vLLM start, and records the memory that they give to adapters."""

from dataclasses import replace
from typing import Any

import pytest

from privmix.engine import lora_on_cpu, vllm_engine


def start_with(patch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Lets the engines that are made from now on start with these arguments of vLLM."""
    arguments = vllm_engine._engine_args
    patch.setattr(vllm_engine, "_engine_args", lambda *given: replace(arguments(*given), **changes))


def recorded_slots(patch: pytest.MonkeyPatch) -> list[int]:
    """Returns the list to which each engine on a CPU will add the bytes of its adapter slots."""
    allocated: list[int] = []
    compact = lora_on_cpu.compact

    def recorded(layers: dict[str, Any], *given: Any) -> None:
        buffers = (buffer for layer in layers.values() for buffer in (*layer.lora_a_stacked, *layer.lora_b_stacked))
        allocated.append(sum(buffer.nbytes for buffer in buffers))
        compact(layers, *given)

    patch.setattr(lora_on_cpu, "compact", recorded)
    return allocated
