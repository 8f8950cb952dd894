"""Trains LoRA adapters, each only from the tokens of its own part or half part.

Training never reads other users' text or a held-out text: there is no validation and no early stopping, and the number
of steps depends on the adapter's own tokens. Losses are private and are neither returned nor shown.

A process loads the public model once and trains many small adapters one after another. A pass of `TOKENS_AT_ONCE`
tokens uses the processor fully, so a pass over blocks of several adapters would not be faster.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save
from torch import Tensor, nn
from transformers import get_linear_schedule_with_warmup
from transformers.utils import logging as transformers_logging

from privmix.engine.adapter_config import CONFIG_FILE, HEAD_AND_EMBEDDING, WEIGHTS_FILE
from privmix.engine.reader_attention import PublicCache, check_modules, check_reader, from_fork, record
from privmix.foundation.errors import InputError, ReaderError, WorkError
from privmix.training import determinism
from privmix.training.options import TrainingOptions
from privmix.training.packing import IGNORED, Tokens, even_size, pack

Files = dict[str, bytes]

_MAX_GRADIENT = 1.0
# The logits of a whole batch (tokens x vocabulary, float32) would take most of the memory. On a CPU, small chunks are
# also faster.
TOKENS_AT_ONCE = {"cpu": 512, "cuda": 8192}
# On a CPU, fused attention has a slower backward pass than plain products for blocks up to this size: a step of 128
# tokens takes 1.2 times as long with it, a step of 512 the same time, a step of 1,024 less.
SHORT_BLOCK = 256
# The rows of logits whose gradient is computed together: few stay in a processor's cache; many need few launches.
_ROWS_AT_ONCE = {"cpu": 32, "cuda": 1024}
# The maximum memory for a part's keys and values that are kept from one epoch to the next.
_KEPT_BYTES = 2**30
_BFLOAT16_CPUS = ("avx512_bf16", "amx_bf16", "bf16", "arm_bf16")


def train_adapter(
    base: Path,
    base_name: str,
    tokens: Tokens,
    options: TrainingOptions,
    seed: int,
    report: Callable[[float], None],
) -> Files:
    """Fine-tunes one adapter. The loaded model stays in this process for later adapters.

    Args:
        base: the public model's directory.
        base_name: the public model's name in the adapter's configuration.
        tokens: int32 [tokens]. An empty array yields the zero adapter, which does not change the public model.
        seed: determines the initial weights and the order of the blocks. It must not depend on private text.
        report: called with the fraction done, 0 to 1.

    Returns:
        the files of a PEFT adapter directory.

    Raises:
        InputError: the model lacks a module in `options.targets`, or does not support readers.
        WorkError: the weights are not finite.
    """
    model, weights = _loaded(base, base_name, options)
    weights.restart(seed)
    report(0.0)
    if len(tokens):
        _fit(model, weights, *pack(tokens, even_size(len(tokens), options.block)), options, seed, report)
    files = _files(model, weights.precise)
    report(1.0)
    return files


def with_lora(
    base: Path, base_name: str, options: TrainingOptions, device: torch.device, *, float32_adapter: bool = True
) -> Any:
    """Loads the public model with a new adapter. Only the adapter's weights require gradients.

    Its mode stays that of evaluation, in which nothing is random (`determinism`).

    Args:
        float32_adapter: keep the adapter in float32 even if the model is in bfloat16.

    Raises:
        InputError: the model lacks a module in `options.targets`, has fewer layers than `options.layers`, does not
            support readers, or has something random.
    """
    transformers_logging.disable_progress_bar()
    narrow = options.precision == "bfloat16" or (options.precision == "auto" and gains_from_bfloat16(device))
    short = device.type == "cpu" and options.block <= SHORT_BLOCK
    model = determinism.load(base, torch.bfloat16 if narrow else torch.float32, "eager" if short else None)
    model.name_or_path = base_name
    check_changeable(model, base_name, options)
    if options.part_kind == "reader":
        check_reader(model, options.targets)
    layers = _changed_layers(model, options)
    lora = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        target_modules=list(options.targets),
        layers_to_transform=list(layers) if layers.start else None,
        task_type="CAUSAL_LM",
    )
    adapted = get_peft_model(model, lora, autocast_adapter_dtype=float32_adapter).to(device).eval()
    determinism.check(adapted)
    return adapted


def check_changeable(model: Any, base_name: str, options: TrainingOptions) -> None:
    """Raises InputError if the model, with weights or without, lacks modules that an adapter may change."""
    if shared := sorted({*options.targets} & {*HEAD_AND_EMBEDDING}):
        raise InputError(f"targets: parts share the model's head and embedding; leave out {', '.join(shared)}")
    if options.part_kind == "reader" and not hasattr(model.get_decoder(), "layers"):
        raise InputError(
            f"model {base_name}: readers change the layers of models that are built like Llama, Qwen, Gemma or "
            f"Mistral, and {model.config.model_type} is not; choose one of them, or --part-kind lora"
        )
    try:
        check_modules(model, options.targets)
    except ReaderError as error:
        raise InputError(
            f"targets: {error}; name modules that it has (--targets, or target_modules of an adapter)"
        ) from error


def _changed_layers(model: Any, options: TrainingOptions) -> range:
    """Returns the layers that the adapter changes."""
    depth = model.config.get_text_config().num_hidden_layers
    return range(depth - (options.for_depth(depth).layers or depth), depth)


def files_of(model: Any) -> Files:
    """Returns the adapter of a model from `with_lora` as the files of a PEFT adapter directory.

    Raises:
        WorkError: the weights are not finite.
    """
    return _files(model, {name: weight for name, weight in model.named_parameters() if "lora_" in name})


@lru_cache(maxsize=1)
def _loaded(base: Path, base_name: str, options: TrainingOptions) -> "tuple[Any, _Weights]":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = with_lora(base, base_name, options, device, float32_adapter=False)
    return model, _Weights(model)


def _files(model: Any, state: Mapping[str, Tensor]) -> Files:
    # By default, PEFT asks the hub whether the vocabulary has changed.
    state = get_peft_model_state_dict(model, state_dict=dict(state), save_embedding_layers=False)
    weights = {name: weight.detach().float().cpu().contiguous() for name, weight in state.items()}
    if not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise WorkError("the weights are not finite; lower the learning rate")
    return {CONFIG_FILE: _config_file(model.peft_config["default"]), WEIGHTS_FILE: save(weights, {"format": "pt"})}


def gains_from_bfloat16(device: torch.device) -> bool:
    """Returns whether this machine multiplies bfloat16 faster than float32 (measured: twice as fast).

    The answer depends only on the processor's capabilities, never on a text.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in _BFLOAT16_CPUS)


class _Weights:
    """Holds an adapter's weights twice: in float32 for the optimiser, and in the model's precision.

    The model computes with its own precision, in which small steps would be rounded away.
    """

    def __init__(self, model: Any) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        self._working = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self.precise = {name: nn.Parameter(weight.detach().float()) for name, weight in self._working.items()}

    def restart(self, seed: int) -> None:
        """Resets the weights to initial values drawn from the seed, and clears the gradients."""
        torch.manual_seed(seed)
        for layer in self._layers:
            layer.reset_lora_parameters("default", True)
        for name, weight in self._working.items():
            self.precise[name].data.copy_(weight.data)
            self.precise[name].grad = torch.zeros_like(self.precise[name])
            weight.grad = None

    def collect_gradient(self) -> None:
        """Adds the gradients of the model's last backward pass to those of `precise`."""
        for name, weight in self._working.items():
            if weight.grad is not None:
                self.precise[name].grad += weight.grad
                weight.grad = None

    def update_model(self) -> None:
        """Copies `precise` to the model's weights."""
        for name, weight in self._working.items():
            weight.data.copy_(self.precise[name].data)


class _PublicCaches:
    """Computes the public model's keys and values for a part's blocks, and keeps them for later epochs if they fit."""

    def __init__(self, model: Any, inputs: Tensor, fork: int, keep: bool) -> None:
        self._model, self._inputs, self._fork = model, inputs, fork
        self._kept: dict[int, PublicCache] = {}
        self._room = _KEPT_BYTES if keep else 0

    def of(self, blocks: Tensor) -> PublicCache:
        """Returns one cache for these blocks, in their order."""
        indices: list[int] = blocks.tolist()
        missing = [index for index in indices if index not in self._kept]
        caches = dict(self._kept)
        if missing:
            recorded = record(self._model, self._inputs[missing].to(self._model.device), fork=self._fork)
            if missing == indices and recorded.nbytes > self._room:
                return recorded
            caches |= zip(missing, recorded.split(), strict=True)
            if recorded.nbytes <= self._room:
                self._room -= recorded.nbytes
                self._kept = caches
        return PublicCache.stack([caches[index] for index in indices])


def _fit(
    model: Any,
    weights: _Weights,
    inputs: Tensor,
    labels: Tensor,
    options: TrainingOptions,
    seed: int,
    report: Callable[[float], None],
) -> None:
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(inputs), generator=generator) for _ in range(options.epochs)]
    batches = [batch for order in orders for batch in torch.split(order, options.batch)]
    rate = options.initial_rate(len(batches))
    optimizer = torch.optim.AdamW(weights.precise.values(), lr=rate, weight_decay=options.weight_decay)
    schedule = get_linear_schedule_with_warmup(optimizer, 0, len(batches))
    caches = None
    if options.part_kind == "reader":
        caches = _PublicCaches(model, inputs, _changed_layers(model, options).start, keep=options.epochs > 1)
    for step, batch in enumerate(batches, start=1):
        optimizer.zero_grad(set_to_none=False)
        _accumulate_gradient(model, weights, inputs, labels, batch, caches)
        torch.nn.utils.clip_grad_norm_(weights.precise.values(), _MAX_GRADIENT)
        optimizer.step()
        schedule.step()
        weights.update_model()
        report(step / len(batches))


def _accumulate_gradient(
    model: Any, weights: _Weights, inputs: Tensor, labels: Tensor, batch: Tensor, caches: _PublicCaches | None
) -> None:
    """Computes the gradient of a batch's mean loss over its tokens, in chunks of a few blocks."""
    device = model.device
    count = int((labels[batch, 1:] != IGNORED).sum())
    for chunk in torch.split(batch, max(1, TOKENS_AT_ONCE[device.type] // inputs.shape[1])):
        cache = PublicCache() if caches is None else caches.of(chunk)
        reader = None if caches is None else cache.reader(inputs.shape[1])
        with nullcontext() if caches is None else from_fork(model, cache):
            logits = model(input_ids=inputs[chunk].to(device), past_key_values=reader, use_cache=False).logits
        targets = torch.full_like(labels[chunk], IGNORED)
        targets[:, :-1] = labels[chunk, 1:]
        logits.backward(loss_gradient(logits.detach(), targets.to(device), torch.tensor(1 / max(count, 1))))
        weights.collect_gradient()


def loss_gradient(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Returns the gradient of a weighted sum of cross entropies, [B, T, V], for logits [B, T, V].

    The loss itself is not needed. A few rows at a time stay in the processor's cache; autograd would read and write
    matrices of float32 [B T, V] several times. A row of it depends on that row alone.

    Args:
        targets: int64 [B, T]. Positions with the target `IGNORED` do not count.
        weights: the weight of each position, broadcast to [B, T].
    """
    gradient = torch.empty_like(logits)
    read = targets != IGNORED
    weights = torch.where(read, weights, 0.0).float()
    wanted = targets.where(read, 0)
    rows_at_once = _ROWS_AT_ONCE[logits.device.type]
    blocks = (torch.split(values.flatten(0, 1), rows_at_once) for values in (logits, gradient, wanted, weights))
    for rows, result, own, share in zip(*blocks, strict=True):
        chances = torch.softmax(rows, dim=-1, dtype=torch.float32)
        chances[torch.arange(len(own), device=own.device), own] -= 1
        result.copy_(chances.mul_(share[:, None]))
    return gradient


def _config_file(config: LoraConfig) -> bytes:
    config.inference_mode = True
    # PEFT keeps the modules in a set. Sorting makes the files of equal adapters equal.
    return json.dumps(config.to_dict(), indent=2, sort_keys=True, default=sorted).encode()
