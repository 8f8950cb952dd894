"""LoRA products for vLLM's CPU build that do not copy an adapter per token.

vLLM's reference operators gather one copy of the adapter's weights for every token of the batch, which makes prefill
with many adapters some twenty times slower than without. Tokens of one request are contiguous and share an adapter, so
a matrix product per run of equal adapters computes the same thing. GPU builds have kernels of their own and are not
touched.
"""

from itertools import groupby
from typing import Any

import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU
from vllm.platforms import current_platform

MIN_TOKENS_PER_RUN = 4
"""Below this many tokens a run on average, one gathered product over all tokens is faster than a product per run."""


class GroupedPunicaWrapper(PunicaWrapperCPU):  # type: ignore[misc]
    """One matrix product per run of tokens with the same adapter."""

    def update_metadata(self, *args: Any, **kwargs: Any) -> None:
        super().update_metadata(*args, **kwargs)
        self._runs: list[tuple[int, int, int]] = []
        start = 0
        for adapter, tokens in groupby(self.token_lora_indices.tolist()):
            end = start + sum(1 for _ in tokens)
            self._runs.append((start, end, adapter))
            start = end
        self._grouped = start >= MIN_TOKENS_PER_RUN * len(self._runs)

    def _apply_shrink(self, y: torch.Tensor, x: torch.Tensor, w_t_all: torch.Tensor, scale: float) -> None:
        if not self._grouped:
            super()._apply_shrink(y, x, w_t_all, scale)
            return
        for start, end, adapter in self._runs:
            if adapter >= 0:
                weights = w_t_all[adapter].squeeze(0)
                y[start:end] = (x[start:end] @ weights.T) * scale

    def _apply_expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        if not (self._grouped and add_inputs):
            super()._apply_expand(y, x, w_t_all, y_offset, y_slice_size, add_inputs)
            return
        for start, end, adapter in self._runs:
            if adapter >= 0:
                weights = w_t_all[adapter].squeeze(0)
                y[start:end, y_offset : y_offset + y_slice_size] += x[start:end].to(weights.dtype) @ weights.T


def install() -> None:
    """Make vLLM's CPU platform choose the grouped operators."""
    type(current_platform).get_punica_wrapper = classmethod(
        lambda _cls: f"{__name__}.{GroupedPunicaWrapper.__qualname__}"
    )
