"""DP-SGD on an adapter, with a record or a whole user as the unit whose gradient is clipped.

Opacus computes the gradient of each block of tokens by hooks on the adapter's linear layers, clips and adds up; between
the two, the blocks of one unit are added up first, so that all of it is clipped as one. The batches and the noise are
the operating system's randomness, because whoever can tell them is promised nothing.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import get_linear_schedule_with_warmup

from services.privacy.sampling.randomness import normal, poisson_subsample
from services.training.adapter import TOKENS_AT_ONCE, Files, files_of, with_lora
from services.training.options import TrainingOptions
from services.training.packing import IGNORED, Tokens, pack

# The gradients of so many blocks are in memory at a time (and of all blocks of one unit).
_BLOCKS_AT_ONCE = 32


class Noisy(DPOptimizer):  # type: ignore[misc]
    """Opacus' optimiser with noise from the operating system, in place of a generator that a seed determines.

    Opacus' own secure noise needs torchcsprng, which has no build for this PyTorch. The noise is in floating point:
    its finest digits could tell (Mironov 2012) whoever sees the noisy gradients, or every weight, of each step.
    """

    def add_noise(self) -> None:
        deviation = self.noise_multiplier * self.max_grad_norm
        for weight in self.params:
            noise = torch.from_numpy(normal(weight.numel())).view_as(weight) * deviation
            weight.grad = (weight.summed_grad + noise.to(weight)).view_as(weight)


def train_adapter(
    base: Path,
    base_name: str,
    units: Sequence[Tokens],
    options: TrainingOptions,
    seed: int,
    report: Callable[[float], None],
    *,
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    clip: float,
    expected_batch: int,
) -> Files:
    """Fine-tune one adapter.

    Args:
        base: the public model's directory.
        base_name: what the adapter's configuration calls it.
        units: for each record or user the tokens that it contributes.
        seed: decides the initial weights alone.
        report: called with the fraction done, 0 to 1.
        clip: the length of the gradient of a unit's mean loss at most.
        expected_batch: what the sum of a batch's gradients is divided by, however large the batch is.

    Returns:
        the files of a PEFT adapter directory.

    Raises:
        InputError: the model has no modules of the names in `options.targets`.
        WorkError: the weights are no longer finite.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    model = with_lora(base, base_name, options, device)
    hooked = with_hooks(model)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    adam = torch.optim.AdamW(weights, lr=options.learning_rate, weight_decay=options.weight_decay)
    optimizer = Noisy(adam, noise_multiplier=noise_multiplier, max_grad_norm=clip, expected_batch_size=expected_batch)
    schedule = get_linear_schedule_with_warmup(adam, num_warmup_steps=0, num_training_steps=steps)
    model.train()
    report(0.0)
    for step in range(1, steps + 1):
        batch = poisson_subsample(len(units), sampling_rate)
        private_step(hooked, optimizer, [units[index] for index in batch], options.block)
        schedule.step()
        report(step / steps)
    return files_of(model)


def with_hooks(model: Any) -> Any:
    """The model, whose weights remember the gradient of each block: [blocks, *weight] of the sum of losses."""
    # The first layer's input is the embedding, which is not trained: no gradient goes there, and none is needed.
    warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
    return GradSampleModule(model, loss_reduction="sum", strict=False)


def private_step(model: Any, optimizer: DPOptimizer, batch: Sequence[Tokens], block: int) -> None:
    """One noisy step on the units of a batch, which may be none."""
    groups = list(_groups(batch, block)) or [[]]
    for number, units in enumerate(groups, start=1):
        unit_gradients(model, units, block)
        optimizer.signal_skip_step(do_skip=number < len(groups))
        optimizer.step()
        optimizer.zero_grad()


def unit_gradients(model: Any, units: Sequence[Tokens], block: int) -> None:
    """Leaves in `grad_sample` of each weight the gradient of each unit's mean loss over its tokens: [units, *weight].

    Args:
        model: from `with_hooks`.
    """
    owners = _accumulate_gradients(model, units, block)
    for weight in (weight for weight in model.parameters() if weight.requires_grad):
        gradients = weight.new_zeros(len(units), *weight.shape)
        found = weight.grad_sample
        if found is not None:
            of_blocks = torch.cat(found) if isinstance(found, list) else found
            gradients.index_add_(0, owners.to(weight.device), of_blocks.to(weight.dtype))
        weight.grad_sample = gradients


def _accumulate_gradients(model: Any, units: Sequence[Tokens], block: int) -> Tensor:
    """Gradients by block, of which each adds its share to its unit's mean; int64 [blocks], the unit of each."""
    packed = [pack(tokens, block) for tokens in units]
    owners = torch.tensor([unit for unit, (inputs, _) in enumerate(packed) for _ in inputs], dtype=torch.int64)
    if not packed:
        return owners
    device = next(model.parameters()).device
    inputs, targets = (torch.cat(blocks) for blocks in zip(*packed, strict=True))
    targets = targets[:, 1:]
    counts = torch.zeros(len(units), dtype=torch.int64).index_add_(0, owners, (targets != IGNORED).sum(dim=1))
    shares = 1 / counts.clamp(min=1)[owners]
    at_once = max(1, TOKENS_AT_ONCE[device.type] // block)
    for some, target, share in zip(*(torch.split(each, at_once) for each in (inputs, targets, shares)), strict=True):
        logits = model(input_ids=some.to(device), use_cache=False).logits[:, :-1]
        losses = cross_entropy(
            logits.float().flatten(0, 1), target.flatten().to(device), ignore_index=IGNORED, reduction="none"
        )
        torch.autograd.backward((losses.view(target.shape).sum(dim=1) * share.to(device)).sum())
    return owners


def _groups(batch: Sequence[Tokens], block: int) -> Iterator[list[Tokens]]:
    """Whole units whose blocks fit into memory together, or one at a time."""
    group: list[Tokens] = []
    blocks = 0
    for tokens in batch:
        size = -(-len(tokens) // block)
        if group and blocks + size > _BLOCKS_AT_ONCE:
            yield group
            group, blocks = [], 0
        group.append(tokens)
        blocks += size
    if group:
        yield group
