"""Lets vLLM's RMS norms on a CPU run as one compiled operator, which vLLM builds and does not use there.

vLLM computes a norm on a CPU by ten of torch's operators: 40 microseconds for the rows of a step, some 60 times a step,
where its own operator takes 5. That one multiplies by the weights before it rounds, and torch's after.

Reviewed against vLLM 0.32.0 (`vllm/kernels/vllm_c.py`, which registers these operators for GPUs alone).
"""

import torch
from torch import Tensor
from vllm.ir.ops import fused_add_rms_norm, rms_norm
from vllm.platforms import current_platform

PROVIDER = "privmix"
WIDTH = 16
"""The operators read so many numbers at once."""


def fits(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
    """Returns whether the compiled operators take these rows."""
    return (
        weight is not None
        and weight.dtype == x.dtype
        and variance_size is None
        and x.is_contiguous()
        and x.shape[-1] % WIDTH == 0
    )


def norm(x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None) -> Tensor:
    """Returns the norm of rows; see `vllm.ir.ops.rms_norm`."""
    normalised = torch.empty_like(x)
    torch.ops._C.rms_norm(normalised, x, weight, epsilon)
    return normalised


def norm_of_sum(
    x: Tensor, x_residual: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Returns the norm of the sums of rows, and the sums, in place of both; see `vllm.ir.ops.fused_add_rms_norm`."""
    torch.ops._C.fused_add_rms_norm(x, x_residual, weight, epsilon)
    return x, x_residual


def install() -> None:
    """Makes the norms of this process's engines on a CPU use the compiled operators where these take the rows."""
    current_platform.import_kernels()
    if PROVIDER not in rms_norm.impls:
        rms_norm.register_impl(
            PROVIDER, supports_args=lambda x, weight, epsilon, variance_size=None: fits(x, weight, variance_size)
        )(norm)
        fused_add_rms_norm.register_impl(
            PROVIDER,
            supports_args=lambda x, x_residual, weight, epsilon, variance_size=None: (
                fits(x, weight, variance_size) and x_residual.is_contiguous() and x_residual.dtype == x.dtype
            ),
            inplace=True,
        )(norm_of_sum)
    for operator in (rms_norm, fused_add_rms_norm):
        operator.set_default([PROVIDER, "native"])
