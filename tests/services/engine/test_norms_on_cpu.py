"""Claim: norms on a CPU are those of vLLM's own definition, in one operator wherever that one takes the rows."""

import pytest
import torch

pytest.importorskip("vllm", reason="the extra `vllm` is not installed")

from vllm import ir
from vllm.platforms import current_platform

from privmix.engine import norms_on_cpu

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="a GPU has norms of its own")


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for operator in (ir.ops.rms_norm, ir.ops.fused_add_rms_norm):
        monkeypatch.setattr(operator, "_priority_impls", [])
    norms_on_cpu.install()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2.0**-7)])
def test_norms_are_those_of_the_definition(dtype: torch.dtype, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 5, 48, generator=generator).to(dtype)
    weight = torch.randn(48, generator=generator).to(dtype)
    apart = ir.ops.rms_norm.impls["native"].impl_fn(x, weight, 1e-5)
    assert ir.ops.rms_norm.dispatch(x, weight, 1e-5).provider == norms_on_cpu.PROVIDER
    torch.testing.assert_close(ir.ops.rms_norm(x, weight, 1e-5), apart, rtol=tolerance, atol=tolerance)
    given = x.clone(), residual.clone()
    expected = ir.ops.fused_add_rms_norm.impls["native"].impl_fn(x, residual, weight, 1e-5)
    assert ir.ops.fused_add_rms_norm.dispatch(*given, weight, 1e-5).provider == norms_on_cpu.PROVIDER
    for ours, theirs in zip(ir.ops.fused_add_rms_norm.maybe_inplace(*given, weight, 1e-5), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    alone = ir.ops.rms_norm(x[2:3].contiguous(), weight, 1e-5)
    assert torch.equal(alone[0], ir.ops.rms_norm(x, weight, 1e-5)[2]), "rows beside it change nothing"


@pytest.mark.parametrize("spoil", ["layout", "width", "type", "weights", "part of a row"])
def test_other_rows_are_left_to_torch(spoil: str) -> None:
    x, weight, size = torch.ones(4, 32), torch.ones(32), None
    match spoil:
        case "layout":
            x = torch.ones(4, 64)[:, :32]
        case "width":
            x, weight = torch.ones(4, 20), torch.ones(20)
        case "type":
            weight = weight.bfloat16()
        case "weights":
            weight = None  # type: ignore[assignment]
        case _:
            size = 16
    assert ir.ops.rms_norm.dispatch(x, weight, 1e-5, size).provider == "native"
    assert ir.ops.fused_add_rms_norm.dispatch(x, x.clone(), weight, 1e-5, size).provider == "native"
