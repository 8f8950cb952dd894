"""One LoRA adapter, from the tokens of its part, or of its half of one, alone.

Nothing here looks at other users' text or at a held-out one: there is no validation, no early stopping, and the number
of steps follows from the adapter's own tokens. Losses are private and are neither returned nor shown.
"""

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup
from transformers.utils import logging as transformers_logging

from services.training.errors import InputError, TrainingError
from services.training.options import TrainingOptions
from services.training.packing import IGNORED, Tokens, pack

# The names that PEFT and vLLM read.
Files = dict[str, bytes]
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"

_LARGEST_GRADIENT = 1.0
# The logits of a whole batch (tokens x vocabulary, float32) would be most of the memory; on a CPU, chunks that stay
# small are faster too.
TOKENS_AT_ONCE = {"cpu": 512, "cuda": 8192}
# On a CPU the fused attention's backward pass is slower than plain products for blocks up to this: a step of 128 tokens
# took 1.2 times as long with it, one of 512 the same, one of 1,024 less.
_SHORT_BLOCK = 256
_BFLOAT16_CPUS = ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16")


def train_adapter(
    base: Path,
    base_name: str,
    tokens: Tokens,
    options: TrainingOptions,
    seed: int,
    report: Callable[[float], None],
) -> Files:
    """Fine-tune one adapter.

    Args:
        base: the public model's directory.
        base_name: what the adapter's configuration calls it.
        tokens: int32 [tokens]; none gives the zero adapter, which leaves the public model as it is.
        seed: decides the initial weights and the order of the blocks; it must not depend on any private text.
        report: called with the fraction done, 0 to 1.

    Returns:
        the files of a PEFT adapter directory.

    Raises:
        InputError: the model has no modules of the names in `options.targets`.
        TrainingError: the weights are no longer finite.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    model = with_lora(base, base_name, options, device)
    report(0.0)
    if len(tokens):
        _fit(model, *pack(tokens, options.block), options, seed, report)
    files = files_of(model)
    report(1.0)
    return files


def with_lora(base: Path, base_name: str, options: TrainingOptions, device: torch.device) -> Any:
    """The public model with a fresh adapter, which is all that is to be trained.

    Raises:
        InputError: the model has no modules of the names in `options.targets`.
    """
    transformers_logging.disable_progress_bar()
    narrow = options.precision == "bfloat16" or (options.precision == "auto" and gains_from_bfloat16(device))
    short = device.type == "cpu" and options.block <= _SHORT_BLOCK
    model = AutoModelForCausalLM.from_pretrained(
        base,
        dtype=torch.bfloat16 if narrow else torch.float32,
        attn_implementation="eager" if short else None,
    )
    model.name_or_path = base_name
    lora = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=list(options.targets),
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, lora).to(device)
    except ValueError as error:
        raise InputError(f"targets: the model has no modules named {', '.join(options.targets)}") from error


def files_of(model: Any) -> Files:
    """The adapter of a model from `with_lora`, as the files of a PEFT adapter directory.

    Raises:
        TrainingError: the weights are no longer finite.
    """
    # Left to itself, PEFT asks the hub whether the vocabulary was changed.
    state = get_peft_model_state_dict(model, save_embedding_layers=False)
    weights = {name: weight.float().cpu().contiguous() for name, weight in state.items()}
    if not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise TrainingError("the weights are no longer finite; lower the learning rate")
    return {CONFIG_FILE: _config_file(model.peft_config["default"]), WEIGHTS_FILE: save(weights, {"format": "pt"})}


def gains_from_bfloat16(device: torch.device) -> bool:
    """Whether this machine multiplies bfloat16 faster than float32 (twice as fast, where this was measured).

    Decided from what the processor says it can do, so that it never depends on a text.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in _BFLOAT16_CPUS)


def _fit(
    model: Any, inputs: Tensor, labels: Tensor, options: TrainingOptions, seed: int, report: Callable[[float], None]
) -> None:
    trainable = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=options.learning_rate, weight_decay=options.weight_decay)
    batches = list(_batches(len(inputs), options, seed))
    schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=len(batches))
    model.train()
    for step, batch in enumerate(batches, start=1):
        _accumulate_gradient(model, inputs[batch], labels[batch])
        torch.nn.utils.clip_grad_norm_(trainable, _LARGEST_GRADIENT)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        report(step / len(batches))


def _batches(blocks: int, options: TrainingOptions, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(options.epochs):
        yield from torch.split(torch.randperm(blocks, generator=generator), options.batch)


def _accumulate_gradient(model: Any, inputs: Tensor, labels: Tensor) -> None:
    """Gradient of the mean loss over the batch's tokens, a few blocks at a time."""
    device = model.device
    targets = labels[:, 1:]
    count = int((targets != IGNORED).sum())
    blocks = max(1, TOKENS_AT_ONCE[device.type] // inputs.shape[1])
    for chunk, target in zip(torch.split(inputs, blocks), torch.split(targets, blocks), strict=True):
        logits = model(input_ids=chunk.to(device), use_cache=False).logits[:, :-1]
        loss = cross_entropy(logits.float().flatten(0, 1), target.flatten().to(device), reduction="sum")
        torch.autograd.backward(loss / max(count, 1))


def _config_file(config: LoraConfig) -> bytes:
    config.inference_mode = True
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        content = json.loads((Path(directory) / CONFIG_FILE).read_bytes())
    # PEFT keeps them in a set; in order, equal adapters are equal files.
    with suppress(KeyError):
        content["target_modules"] = sorted(content["target_modules"])
    return json.dumps(content, indent=2, sort_keys=True).encode()
