"""Claim: what a GPU launches for adapters depends on the number of rows, and no row is left out."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora.ops.triton_ops.lora_kernel_metadata import LoRAKernelMeta

from services.engine.adapter_slots import launched_for_rows
from services.engine.gpu_reader_worker import GPUReaderModelRunner
from services.engine.reader_rows import ReaderRows

SLOTS = 64


def computed(kernels: LoRAKernelMeta, rows: int) -> tuple[int, list[int]]:
    """Returns the number of adapters of vLLM's grid, and the rows that its blocks compute, as the kernels find them."""
    _, sorted_rows, counts, starts, adapters, _, launched = kernels.meta_args(rows, specialize_active_lora=False)
    found: list[int] = []
    for adapter in range(int(launched)):
        if adapters[adapter] != -1:
            found += sorted_rows[starts[adapter] :][: counts[adapter]].tolist()
    return int(launched), sorted(found)


@pytest.mark.parametrize("rows", [1, 16, 200])
def test_all_draws_of_as_many_rows_launch_the_same(rows: int) -> None:
    """Also if the rows share one adapter, or have the last slots."""
    kernels = LoRAKernelMeta.make(SLOTS, 512, "cpu")
    generator = torch.Generator().manual_seed(0)
    draws = [
        torch.zeros(rows, dtype=torch.long),
        torch.arange(rows) % SLOTS,
        SLOTS - 1 - torch.arange(rows) % SLOTS,
        torch.randint(SLOTS, (rows,), generator=generator),
    ]
    for draw in draws:
        kernels.prepare_tensors(draw)
        with launched_for_rows(kernels, rows):
            assert computed(kernels, rows) == (min(rows, SLOTS + 1), list(range(rows)))


def test_the_public_pass_launches_for_all_slots_as_its_graphs_do() -> None:
    kernels = LoRAKernelMeta.make(SLOTS, 512, "cpu")
    kernels.prepare_tensors(torch.tensor([5, -1, 5]))
    with pytest.raises(RuntimeError), launched_for_rows(kernels, 2):
        raise RuntimeError
    assert computed(kernels, 3) == (SLOTS + 1, [0, 2]), "the row without an adapter has no work"


def test_the_pass_of_the_readers_on_a_gpu_launches_for_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = LoRAKernelMeta.make(SLOTS, 512, "cpu")
    monkeypatch.setattr(ReaderRows, "_run_readers", lambda *_: int(kernels.default_num_active_loras_cpu))
    runner: Any = GPUReaderModelRunner.__new__(GPUReaderModelRunner)
    wrapper = SimpleNamespace(token_mapping_meta=kernels)
    runner.lora_manager = SimpleNamespace(
        _adapter_manager=SimpleNamespace(punica_wrapper_mapping={"language_model": wrapper})
    )
    batch = SimpleNamespace(readers=7)
    runner.slots = object()
    assert runner._run_readers(batch, None) == 7
    assert int(kernels.default_num_active_loras_cpu) == SLOTS + 1
