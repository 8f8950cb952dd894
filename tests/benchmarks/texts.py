"""Measures what parts gain that are texts: `python -m tests.benchmarks.texts CORPUS.jsonl --tokens 1024`.

CORPUS is public or set-aside text, by user. A keyed hash holds users out and assigns the others to 16 parts, of which
four are measured. For each number of tokens of a text, the gains over the public model in nats per held-out token:

- `row`: of rows that read the text and the public model's cache of the sequence, as served.
- `prompt`: of the text in the prompt itself. Each part then needs a cache of its own for each sequence.

Both are means over the parts; `of their mean` is the gain of the mean of the four distributions.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import AutoTokenizer

from privmix.engine.engine import PUBLIC, AdapterFiles
from privmix.engine.part_text import read_text, text_files
from privmix.foundation.files import write_files
from privmix.laboratory.evaluation.adapted_model import AdaptedModel
from privmix.training.corpus import Corpus
from privmix.training.packing import tokenize
from privmix.training.partition import Partition, PartShare
from privmix.training.public_model import resolve
from privmix_cluster.options import JsonOption
from tests.benchmarks.options import CorpusArgument, show
from tests.benchmarks.public_text import held_apart

PARTS, MEASURED = 16, 4
BLOCK, BLOCKS = 128, 8


def benchmark(
    corpus: CorpusArgument,
    tokens: Annotated[list[int], typer.Option(help="Of each text; repeatable.")] = [256, 1024],  # noqa: B006
    quick: Annotated[bool, typer.Option("--quick", help="One small text, one block.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measures the gains for each number of tokens."""
    torch.set_num_threads(1)
    tokens = [64] if quick else tokens
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        held_out, parts = divided(corpus, folder, 1 if quick else BLOCKS)
        gains = {size: measure(held_out, parts, size, folder / str(size)) for size in tokens}
    show(gains, as_json)


def divided(corpus: Path, folder: Path, blocks: int) -> tuple[Tensor, list[np.ndarray]]:
    """Returns blocks of held-out text, [blocks, BLOCK], and the tokens of the parts."""
    train, held_out = held_apart(Corpus(corpus), folder)
    tokenizer = AutoTokenizer.from_pretrained(resolve())
    stream = tokenize(held_out, tokenizer, Partition(bytes(32), 1))[PartShare(0)]
    spread = np.linspace(0, len(stream) - BLOCK, blocks).astype(int)
    shares = tokenize(train, tokenizer, Partition(bytes(32), PARTS))
    sequences = np.stack([stream[start : start + BLOCK] for start in spread])
    return torch.from_numpy(sequences.astype(np.int64)), [shares[PartShare(part)] for part in range(MEASURED)]


def measure(held_out: Tensor, parts: list[np.ndarray], size: int, folder: Path) -> dict[str, float]:
    model = AdaptedModel(resolve(), torch.float32)
    for part, tokens in enumerate(parts):
        path = folder / str(part)
        write_files(path, text_files(tokens, size))
        model.load(str(part), AdapterFiles(path, "text"))
    sums: dict[str, list[Tensor]] = {"public": [], "row": [], "prompt": []}
    for block in held_out:
        cache = model.record(block[None])
        sums["public"].append(_likelihoods(model.logits(PUBLIC, block[None], BLOCK, cache)[0], block)[None])
        names = [str(part) for part in range(MEASURED)]
        rows = [model.logits(name, block[None], BLOCK, cache)[0] for name in names]
        prompts = []
        for name in names:
            whole = torch.cat([read_text(folder / name), block])[None]
            prompts.append(model.logits(PUBLIC, whole, BLOCK, cache)[0])
        sums["row"].append(torch.stack([_likelihoods(logits, block) for logits in rows]))
        sums["prompt"].append(torch.stack([_likelihoods(logits, block) for logits in prompts]))
    public, row, prompt = (torch.cat(values, dim=1) for values in sums.values())
    return {
        name: round(float(gain), 3)
        for kind, values in (("row", row), ("prompt", prompt))
        for name, gain in (
            (kind, (values - public).mean()),
            (f"{kind}, of their mean", (values.logsumexp(0) - np.log(len(values)) - public).mean()),
        )
    }


def _likelihoods(logits: Tensor, block: Tensor) -> Tensor:
    """Returns the log-probability of each token of a block after those before it, [BLOCK - 1]."""
    return logits[:-1].log_softmax(-1).gather(1, block[1:, None])[:, 0]


if __name__ == "__main__":
    typer.run(benchmark)
