"""Computes next-token distributions at every position of a block in one forward pass.

`Engine.next_token` returns the distribution after one context. Held-out text is known in advance, so one forward pass
over a block yields the distributions at all of its positions.

A model's last hidden state is smaller than its distribution by the ratio of the vocabulary to the hidden size, which is
85 for SmolLM2-135M. Adapters do not change the output layer (`Head`). So hidden states are stored, and distributions
are computed from them on demand.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from privmix.engine import PartKind
from privmix.engine.engine import PUBLIC, AdapterFiles
from privmix.engine.part_text import read_text
from privmix.engine.reader_attention import PublicCache, record, record_text
from privmix.engine.switching import using
from privmix.foundation.errors import InputError
from privmix.laboratory.evaluation.options import Precision
from privmix.laboratory.evaluation.text import Block
from privmix.training.adapter import gains_from_bfloat16
from privmix.training.packing import similar

# The maximum number of tokens in a batch. More are not faster on a CPU.
_TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 16384}


class Head:
    """Computes log-probabilities from hidden states with a model's output layer.

    Args:
        weight: [V, D].
        bias: [V], or None.
        narrow: whether weight and hidden states are bfloat16 numbers. Then products in bfloat16 with sums in float32
            are as precise. Logits in bfloat16 would not be: a logit of 16 has an error of 0.06, and so has its
            log-probability.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, narrow: bool) -> None:
        self._weight = weight.detach().float()
        self._bias = None if bias is None else bias.detach().float()
        self._narrow = narrow

    @property
    def vocabulary(self) -> int:
        return len(self._weight)

    @property
    def size(self) -> int:
        """D, the size of a hidden state."""
        return self._weight.shape[1]

    @torch.no_grad()
    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """Returns float32 [n, V] of hidden states [n, D]."""
        with _products_of_bfloat16(self._narrow):
            return nn.functional.linear(hidden.float(), self._weight, self._bias).log_softmax(-1)

    def save(self, path: Path) -> None:
        tensors = {"weight": self._weight} | ({} if self._bias is None else {"bias": self._bias})
        save_file({**tensors, "narrow": torch.tensor(self._narrow)}, path)

    @classmethod
    def load(cls, path: Path) -> Self:
        tensors = load_file(path)
        return cls(tensors["weight"], tensors.get("bias"), bool(tensors["narrow"]))


class AdaptedModel:
    """Computes logits of the base model and of its adapters, without gradients, on a GPU if one is present.

    Each adapter is what its manifest's `part_kind` says. One pass of the public model serves all readers.
    """

    def __init__(self, base: Path, dtype: torch.dtype) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.base: Any = AutoModelForCausalLM.from_pretrained(base, dtype=dtype).to(self.device).eval()
        self._model = self.base
        self._part_kinds: dict[str, PartKind] = {}
        self._texts: dict[str, PublicCache] = {}

    def load(self, name: str, files: AdapterFiles) -> None:
        self._part_kinds[name] = files.part_kind
        if files.part_kind == "text":
            self._texts[name] = record_text(self.base, read_text(files.path).to(self.device))
            return
        if isinstance(self._model, PeftModel):
            self._model.load_adapter(files.path, adapter_name=name)
        else:
            self._model = PeftModel.from_pretrained(self._model, files.path, adapter_name=name)
        self._model.eval()

    def unload(self) -> None:
        """Removes all adapters."""
        if isinstance(self._model, PeftModel):
            self._model.unload()
        self._model = self.base
        self._part_kinds.clear()
        self._texts.clear()

    @torch.inference_mode()
    def record(self, tokens: Tensor) -> PublicCache:
        """Returns the public model's keys and values for sequences [B, T]; an empty cache if no adapter uses them."""
        return record(self._model, tokens) if {"reader", "text"} & set(self._part_kinds.values()) else PublicCache()

    @torch.inference_mode()
    def logits(self, name: str, tokens: Tensor, cache: PublicCache) -> Tensor:
        """Returns the logits after each token, [B, T, V].

        Args:
            name: the name of an adapter, or `PUBLIC`.
            tokens: whole sequences, [B, T].
            cache: the result of `record` for the same sequences.
        """
        text = self._texts.get(name)
        with using(self._model, PUBLIC if text is not None else name):
            if self._part_kinds.get(name) in ("reader", "text"):
                output = self._model(input_ids=tokens, past_key_values=cache.reader(tokens.shape[1], text))
            else:
                output = self._model(input_ids=tokens, use_cache=False)
        logits: Tensor = output.logits
        return logits


class Scorer:
    """Scores a base model, without adapters or with changing adapters.

    Raises:
        InputError: the model changes its logits after the output layer.
    """

    def __init__(self, model: Path, precision: Precision = "auto") -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        narrow = precision == "bfloat16" or (precision == "auto" and gains_from_bfloat16(device))
        self._model = AdaptedModel(model, torch.bfloat16 if narrow else torch.float32)
        base = self._model.base
        output = base.get_output_embeddings()
        self.head = Head(output.weight, output.bias, narrow)
        base.set_output_embeddings(_Constant())
        with torch.no_grad():
            logits = base(input_ids=torch.zeros(1, 1, dtype=torch.long, device=device)).logits
        if not torch.equal(logits, torch.full_like(logits, _Constant.VALUE)):
            raise InputError(
                f"model {model}: changes its logits after the output layer (by a soft cap or a scale), which the "
                "evaluation does not reproduce; evaluate another model"
            )
        base.set_output_embeddings(nn.Identity())  # now the model's `logits` are its hidden states

    def hidden_states(
        self,
        blocks: Sequence[Block],
        adapters: Sequence[AdapterFiles] = (),
    ) -> Iterator[tuple[int, int, Tensor]]:
        """Computes the last hidden states before the targets of all blocks, for each adapter or for the base model.

        The public model reads each block once for all readers. Without adapters, it scores the base model.

        Yields:
            the index of an adapter (0 for the base model), the index of a block, and [targets, D], in any order.
        """
        model = self._model
        names = [str(index) for index in range(len(adapters))]
        try:
            for name, adapter in zip(names, adapters, strict=True):
                model.load(name, adapter)
            for batch in similar([len(block.tokens) for block in blocks], _TOKENS_AT_ONCE[model.device.type]):
                # Causal attention: padding at the end needs no mask.
                inputs = nn.utils.rnn.pad_sequence(
                    [torch.tensor(blocks[index].tokens) for index in batch], batch_first=True
                ).to(model.device)
                cache = model.record(inputs)
                for number, name in enumerate(names or [PUBLIC]):
                    states = model.logits(name, inputs, cache)
                    for row, index in zip(states, batch, strict=True):
                        yield number, index, row[torch.tensor(blocks[index].targets, device=row.device) - 1]
        finally:
            model.unload()


class _Constant(nn.Module):
    """Returns constant logits, which reveal whether the model changes logits after the output layer."""

    VALUE = 64.0

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.full_like(hidden, self.VALUE)


@contextmanager
def _products_of_bfloat16(narrow: bool) -> Iterator[None]:
    matmul: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    if narrow:
        matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before
