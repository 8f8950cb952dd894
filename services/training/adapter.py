"""LoRA adapters, each from the tokens of its part, or of its half of one, alone.

Nothing here looks at other users' text or at a held-out one: there is no validation, no early stopping, and the number
of steps follows from the adapter's own tokens. Losses are private and are neither returned nor shown.

Many small adapters of one public model are trained one after another in a process that loads the model once. Passes of
`TOKENS_AT_ONCE` tokens fill a processor already, so that blocks of several adapters in one pass would save no time.
"""

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from transformers import AutoModelForCausalLM, get_linear_schedule_with_warmup
from transformers.utils import logging as transformers_logging

from services.engine.reader_attention import PublicCache, ReaderError, check_modules, check_reader, record
from services.errors import InputError, WorkError
from services.training.options import TrainingOptions
from services.training.packing import IGNORED, Tokens, even_size, pack

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
# Keys and values of a part's blocks that are kept from one epoch to the next.
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
    """Fine-tune one adapter. The loaded model stays in this process for the adapters that follow.

    Args:
        base: the public model's directory.
        base_name: what the adapter's configuration calls it.
        tokens: int32 [tokens]; none gives the zero adapter, which leaves the public model as it is.
        seed: decides the initial weights and the order of the blocks; it must not depend on any private text.
        report: called with the fraction done, 0 to 1.

    Returns:
        the files of a PEFT adapter directory.

    Raises:
        InputError: the model has no modules of the names in `options.targets`, or it cannot have readers.
        WorkError: the weights are no longer finite.
    """
    model, weights = _loaded(base, base_name, options)
    weights.restart(seed)
    report(0.0)
    if len(tokens):
        _fit(model, weights, *pack(tokens, even_size(len(tokens), options.block)), options, seed, report)
    files = _files(model, weights.state())
    report(1.0)
    return files


def with_lora(
    base: Path, base_name: str, options: TrainingOptions, device: torch.device, *, float32_adapter: bool = True
) -> Any:
    """The public model with a fresh adapter, which is all that is to be trained.

    Args:
        float32_adapter: keep the adapter in float32 even where the model is in bfloat16.

    Raises:
        InputError: the model has no modules of the names in `options.targets`, or it cannot have readers.
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
    try:
        (check_reader if options.attention == "public" else check_modules)(model, options.targets)
    except ReaderError as error:
        raise InputError(f"targets: {error}") from error
    lora = LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=list(options.targets),
        task_type="CAUSAL_LM",
    )
    return get_peft_model(model, lora, autocast_adapter_dtype=float32_adapter).to(device)


def files_of(model: Any) -> Files:
    """The adapter of a model from `with_lora`, as the files of a PEFT adapter directory.

    Raises:
        WorkError: the weights are no longer finite.
    """
    return _files(model, {name: weight for name, weight in model.named_parameters() if weight.requires_grad})


@lru_cache(maxsize=1)
def _loaded(base: Path, base_name: str, options: TrainingOptions) -> "tuple[Any, _Weights]":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = with_lora(base, base_name, options, device, float32_adapter=False)
    return model, _Weights(model)


def _files(model: Any, state: Mapping[str, Tensor]) -> Files:
    # Left to itself, PEFT asks the hub whether the vocabulary was changed.
    state = get_peft_model_state_dict(model, state_dict=dict(state), save_embedding_layers=False)
    weights = {name: weight.detach().float().cpu().contiguous() for name, weight in state.items()}
    if not all(bool(weight.isfinite().all()) for weight in weights.values()):
        raise WorkError("the weights are no longer finite; lower the learning rate")
    return {CONFIG_FILE: _config_file(model.peft_config["default"]), WEIGHTS_FILE: save(weights, {"format": "pt"})}


def gains_from_bfloat16(device: torch.device) -> bool:
    """Whether this machine multiplies bfloat16 faster than float32 (twice as fast, where this was measured).

    Decided from what the processor says it can do, so that it never depends on a text.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return any(capabilities.get(name, False) for name in _BFLOAT16_CPUS)


class _Weights:
    """An adapter's weights, as one vector in float32 for the optimiser and one that the model computes with.

    Products with the adapter take the model's own precision. In bfloat16 alone, small steps would be rounded away.
    """

    def __init__(self, model: Any) -> None:
        self._layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
        self._named = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
        self._working = parameters_to_vector(self._named.values()).detach()
        vector_to_parameters(self._working, self._named.values())  # from here on, views of it
        self.precise = nn.Parameter(self._working.float())

    def restart(self, seed: int) -> None:
        """Begin another adapter: the initial weights that the seed decides, and no gradient."""
        torch.manual_seed(seed)
        for layer in self._layers:
            layer.reset_lora_parameters("default", True)
        self.precise.data.copy_(self._working)
        self.precise.grad = torch.zeros_like(self.precise)
        for weight in self._named.values():
            weight.grad = None

    def collect_gradient(self) -> None:
        """Add what the model's last backward pass left to the gradient of `precise`."""
        gradients = []
        for weight in self._named.values():
            gradients.append((weight.new_zeros(weight.shape) if weight.grad is None else weight.grad).flatten())
            weight.grad = None
        assert self.precise.grad is not None
        self.precise.grad += torch.cat(gradients)

    def update_model(self) -> None:
        """Let the model compute with `precise`."""
        self._working.copy_(self.precise.detach())

    def state(self) -> dict[str, Tensor]:
        """The weights in float32, by the names of the model's parameters."""
        sizes = [weight.numel() for weight in self._named.values()]
        pieces = torch.split(self.precise.detach(), sizes)
        return {name: piece.view_as(weight) for (name, weight), piece in zip(self._named.items(), pieces, strict=True)}


class _PublicCaches:
    """The public model's keys and values at a part's blocks: computed once, kept for later epochs while they fit."""

    def __init__(self, model: Any, inputs: Tensor, keep: bool) -> None:
        self._model, self._inputs = model, inputs
        self._kept: dict[int, PublicCache] = {}
        self._room = _KEPT_BYTES if keep else 0

    def of(self, blocks: Tensor) -> PublicCache:
        """One cache for these blocks, in their order."""
        indices: list[int] = blocks.tolist()
        missing = [index for index in indices if index not in self._kept]
        found = dict(self._kept)
        if missing:
            recorded = record(self._model, self._inputs[missing].to(self._model.device))
            if missing == indices and recorded.nbytes > self._room:
                return recorded
            found |= zip(missing, recorded.split(), strict=True)
            if recorded.nbytes <= self._room:
                self._room -= recorded.nbytes
                self._kept = found
        return PublicCache.stack([found[index] for index in indices])


def _fit(
    model: Any,
    weights: _Weights,
    inputs: Tensor,
    labels: Tensor,
    options: TrainingOptions,
    seed: int,
    report: Callable[[float], None],
) -> None:
    optimizer = torch.optim.AdamW([weights.precise], lr=options.learning_rate, weight_decay=options.weight_decay)
    batches = list(_batches(len(inputs), options, seed))
    warm_up = round(options.warm_up * len(batches))
    schedule = get_linear_schedule_with_warmup(optimizer, warm_up, len(batches))
    caches = _PublicCaches(model, inputs, keep=options.epochs > 1) if options.attention == "public" else None
    model.train()
    for step, batch in enumerate(batches, start=1):
        optimizer.zero_grad(set_to_none=False)
        _accumulate_gradient(model, weights, inputs, labels, batch, caches)
        torch.nn.utils.clip_grad_norm_(weights.precise, _LARGEST_GRADIENT)
        optimizer.step()
        schedule.step()
        weights.update_model()
        report(step / len(batches))


def _batches(blocks: int, options: TrainingOptions, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(options.epochs):
        yield from torch.split(torch.randperm(blocks, generator=generator), options.batch)


def _accumulate_gradient(
    model: Any, weights: _Weights, inputs: Tensor, labels: Tensor, batch: Tensor, caches: _PublicCaches | None
) -> None:
    """Gradient of the mean loss over the tokens of a batch of blocks, a few blocks at a time."""
    device = model.device
    count = int((labels[batch, 1:] != IGNORED).sum())
    for some in torch.split(batch, max(1, TOKENS_AT_ONCE[device.type] // inputs.shape[1])):
        attended = None if caches is None else caches.of(some).reader(inputs.shape[1])
        logits = model(input_ids=inputs[some].to(device), past_key_values=attended, use_cache=False).logits[:, :-1]
        targets = labels[some, 1:].flatten().to(device)
        loss = cross_entropy(logits.float().flatten(0, 1), targets, reduction="sum")
        torch.autograd.backward(loss / max(count, 1))
        weights.collect_gradient()


def _config_file(config: LoraConfig) -> bytes:
    config.inference_mode = True
    with tempfile.TemporaryDirectory() as directory:
        config.save_pretrained(directory)
        content = json.loads((Path(directory) / CONFIG_FILE).read_bytes())
    # PEFT keeps them in a set; in order, equal adapters are equal files.
    with suppress(KeyError):
        content["target_modules"] = sorted(content["target_modules"])
    return json.dumps(content, indent=2, sort_keys=True).encode()
