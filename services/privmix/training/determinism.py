"""Loads a base model whose pass over a row is a function of the row: without dropout, noise, or statistics of a batch.

The masks of dropout come from one sequence of random numbers. So each row shifts the masks of all rows after it, and
one user would move the gradients of all others. A model keeps no state either, because one process trains many parts.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from transformers import AutoConfig, AutoModelForCausalLM

from privmix.foundation.errors import InputError

_DROPOUT = ("dropout", "pdrop", "layerdrop", "drop_path")
"""The words in the names of a configuration's fields that are chances of dropout."""


def load(base: Path, dtype: torch.dtype, attention: str | None) -> Any:
    """Returns the model of a directory in the mode of evaluation, which has no dropout, router noise or skipped layers.

    Args:
        attention: transformers' attention implementation; None for its default.

    Raises:
        InputError: a module normalises by the statistics of a batch.
    """
    config = AutoConfig.from_pretrained(base)
    _without_dropout(config)
    model = AutoModelForCausalLM.from_pretrained(base, config=config, dtype=dtype, attn_implementation=attention).eval()
    for name, module in model.named_modules():
        if isinstance(module, _DropoutNd):
            module.p = 0.0
        if isinstance(module, _NormBase):
            raise InputError(f"model: its module {name} normalises by the statistics of a batch; choose another model")
    return model


def check(model: Any) -> None:
    """Checks by passes over two rows that a model draws no random number and keeps nothing of a row.

    Raises:
        InputError: it does.
    """
    row = torch.arange(8, device=model.device)[None] % model.config.get_text_config().vocab_size
    before = _random_states(model)
    first, _, again = (_logits(model, inputs) for inputs in (row, row.flip(1).repeat(1, 2), row))
    if any(not torch.equal(old, new) for old, new in zip(before, _random_states(model), strict=True)):
        raise InputError(
            "model: draws random numbers in a pass, such as dropout or router noise that its configuration does not "
            "switch off; choose another model"
        )
    if not torch.allclose(first, again, rtol=1e-2, atol=1e-2):
        raise InputError("model: keeps a state from one text to the next; choose another model")


def _without_dropout(config: Any) -> None:
    """Sets all chances of dropout in a configuration, and in those inside it, to 0."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "to_diff_dict"):
            _without_dropout(value)
        elif isinstance(value, int | float) and any(word in name for word in _DROPOUT):
            setattr(config, name, 0.0)


def _random_states(model: Any) -> list[Tensor]:
    on_gpu = model.device.type == "cuda"
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(model.device)] if on_gpu else [])]


@torch.no_grad()
def _logits(model: Any, inputs: Tensor) -> Tensor:
    logits: Tensor = model(input_ids=inputs, use_cache=False).logits
    return logits.float()
