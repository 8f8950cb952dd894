"""Next-token distributions at every position of a block, in one forward pass.

`Engine.next_token` answers what a service asks: the distribution after a context, one token further each time. Held-out
text is known beforehand, and a forward pass over a block has the distribution at each of its positions already; asking
for them one by one would take as many passes as there are tokens.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from services.engine.adapted_model import AdaptedModel
from services.engine.engine import PUBLIC, AdapterFiles
from services.evaluation.text import Block
from services.training.adapter import gains_from_bfloat16

Precision = Literal["auto", "bfloat16", "float32"]

# Of a batch, whose logits (float32) are most of the memory; more is no faster on a CPU.
_TOKENS_AT_ONCE = {"cpu": 1024, "cuda": 16384}
# Of a block. On a CPU a few, whose memory is used again and again: new pages cost more than the arithmetic on them.
_ROWS_AT_ONCE = {"cpu": 32, "cuda": 4096}


class Scorer:
    """A base model that is scored with some adapters after others, or with none."""

    def __init__(self, model: Path, precision: Precision = "auto") -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        narrow = precision == "bfloat16" or (precision == "auto" and gains_from_bfloat16(device))
        self._model = AdaptedModel(model, torch.bfloat16 if narrow else torch.float32)
        base = self._model.base
        self.vocabulary: int = base.config.get_text_config().vocab_size
        if narrow:
            base.set_output_embeddings(_WideHead(base.get_output_embeddings()))

    def log_probabilities(
        self, blocks: Sequence[Block], adapters: Sequence[AdapterFiles] = ()
    ) -> Iterator[tuple[int, int, int, Tensor]]:
        """Log-probabilities at the targets of all blocks, under each adapter or, without any, the base model.

        The public model goes over each block once for all readers together.

        Yields:
            in any order: the index of an adapter (0 for the base model), of a block, and of a target in it, with
            float32 [n, V] at this target and those after it.
        """
        model, device = self._model, self._model.device.type
        names = [str(index) for index in range(len(adapters))]
        try:
            for name, adapter in zip(names, adapters, strict=True):
                model.load(name, adapter)
            for batch in _batches(blocks, _TOKENS_AT_ONCE[device]):
                # Nothing looks ahead, so what fills up the shorter ones needs no mask.
                inputs = nn.utils.rnn.pad_sequence(
                    [torch.tensor(blocks[index].tokens) for index in batch], batch_first=True
                ).to(device)
                cache = model.record(inputs)
                for which, name in enumerate(names or [PUBLIC]):
                    logits = model.logits(name, inputs, inputs.shape[1], cache)
                    for index, rows in zip(batch, logits, strict=True):
                        before, first = torch.tensor(blocks[index].targets, device=rows.device) - 1, 0
                        for some in torch.split(before, _ROWS_AT_ONCE[device]):
                            yield which, index, first, _log_softmax(rows[some])
                            first += len(some)
                    del logits
        finally:
            model.unload()


@torch.inference_mode()
def _log_softmax(rows: Tensor) -> Tensor:
    return rows.log_softmax(-1, dtype=torch.float32)


class _WideHead(nn.Module):
    """The last layer of a bfloat16 model, with float32 logits: in bfloat16 one of 16 is known to 0.06, and so is its
    log-probability.

    Its factors are bfloat16 numbers, so that products of bfloat16 numbers, summed up in float32, lose nothing.
    """

    def __init__(self, head: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(head.weight.detach().float(), requires_grad=False)
        self.bias = None if head.bias is None else nn.Parameter(head.bias.detach().float(), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        with _products_of_bfloat16():
            return nn.functional.linear(hidden.float(), self.weight, self.bias)


@contextmanager
def _products_of_bfloat16() -> Iterator[None]:
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before  # type: ignore[attr-defined]


def _batches(blocks: Sequence[Block], tokens: int) -> Iterator[list[int]]:
    """Indices of blocks of similar length, at most so many tokens together once they are filled up."""
    batch: list[int] = []
    for index in sorted(range(len(blocks)), key=lambda index: -len(blocks[index].tokens)):
        longest = len(blocks[batch[0]].tokens) if batch else 0
        if batch and longest * (len(batch) + 1) > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
