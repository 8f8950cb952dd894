"""Compares parts that are texts with two published methods: `python -m tests.benchmarks.references CORPUS.jsonl`.

InvisibleInk (Vinod et al., NeurIPS 2025) and Amin et al. (2024) also write synthetic text from private references. All
promise the same here: epsilon and delta for all text of one user, replaced by any other text. So a user gives the two
one reference, the first tokens of their text. They divide users into batches of 16 and write one text with each. As
many tokens are the budget of privmix, which draws 16 of its parts for each token.

- `clip`: of the differences of log-probabilities, or of logits (Amin et al.), at this budget. All three are exponential
  mechanisms, so `ExponentialSettings` plans each: 16 of 16 parts for the tokens of one text, or 16 of N parts for the
  tokens of all texts.
- `gain`: over the public model in nats per held-out token, full vocabulary, temperature 1. InvisibleInk's top-k+
  sampling gives most held-out text the probability 0, and Amin et al. add predictions of the public model alone.

Their papers count epsilon for one example, added or removed. This allows twice the clip: `gain, own unit`.
"""

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor
from transformers import AutoTokenizer

from privmix.engine.engine import PUBLIC, AdapterFiles
from privmix.engine.part_text import text_files
from privmix.foundation.files import write_files
from privmix.laboratory.evaluation.adapted_model import AdaptedModel
from privmix.laboratory.evaluation.text import texts_of_users
from privmix.privacy.mollifiers.shaping import SUPPORT_FLOOR, shape
from privmix.privacy.protocols.exponential import ExponentialSettings
from privmix.training.corpus import Corpus
from privmix.training.packing import tokenize
from privmix.training.partition import Partition, PartShare
from privmix.training.public_model import resolve
from privmix_cluster.options import JsonOption
from tests.benchmarks.options import CorpusArgument, show
from tests.benchmarks.public_text import held_apart

DRAWN = 16
BLOCK = 128
REFERENCE, TEXT = 160, 1024
"""The number of tokens of a reference, and of a part's text."""

# Maps logits of the public model [T, V] and of all references [DRAWN, T, V] to log-probabilities [T, V].
Mechanism = Callable[[Tensor, Tensor], Tensor]


def benchmark(
    corpus: CorpusArgument,
    epsilon: Annotated[list[float], typer.Option(help="Repeatable.")] = [2.0, 8.0],  # noqa: B006
    delta: float = 1e-5,
    tokens: Annotated[int, typer.Option(help="Of a synthetic text.")] = 256,
    parts: Annotated[list[int], typer.Option(help="Of privmix; repeatable.")] = [256, 1024],  # noqa: B006
    blocks: Annotated[int, typer.Option(help="Of held-out text.")] = 8,
    quick: Annotated[bool, typer.Option("--quick", help="One epsilon, 16 small texts, one block.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Measures each method at each epsilon."""
    torch.set_num_threads(1)
    text = TEXT
    if quick:
        epsilon, tokens, parts, blocks, text = [8.0], 16, [DRAWN], 1, 64
    tokenizer = AutoTokenizer.from_pretrained(resolve())
    model = AdaptedModel(resolve(), torch.float32)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        train, held_out = held_apart(Corpus(corpus), Path(name), 4 * REFERENCE)
        stream = tokenize(held_out, tokenizer, Partition(bytes(32), 1))[PartShare(0)]
        spread = np.linspace(0, len(stream) - BLOCK, blocks).astype(int)
        sequences = torch.from_numpy(np.stack([stream[start : start + BLOCK] for start in spread]).astype(np.int64))
        users = [
            text.blocks[0].tokens
            for text in texts_of_users(train, tokenizer, context=REFERENCE, tokens=REFERENCE)
            if text.blocks
        ]
        total = len(users) // DRAWN * tokens
        clips = [_radius(DRAWN, epsilon=each, delta=delta, tokens=tokens) for each in epsilon]
        references = [torch.tensor(user) for user in users[:: len(users) // DRAWN][:DRAWN]]
        mechanisms = [
            mechanism(times * clip) for clip in clips for mechanism in (_invisible_ink, _amin) for times in (1, 2)
        ]
        gains = iter(_gains(sequences, partial(_prompts, model, references), mechanisms))
        rows += [
            _row(method, DRAWN, each, clip, next(gains)) | {"gain, own unit": round(next(gains), 3)}
            for each, clip in zip(epsilon, clips, strict=True)
            for method in ("InvisibleInk", "Amin et al.")
        ]
        for count in parts:
            shares = tokenize(train, tokenizer, Partition(bytes(32), count))
            names = _load(model, [shares[PartShare(part)] for part in range(DRAWN)], text, Path(name) / str(count))
            clips = [_radius(count, epsilon=each, delta=delta, tokens=total, sample=DRAWN) for each in epsilon]
            gains = iter(_gains(sequences, partial(_rows, model, names), [_exponential(clip) for clip in clips]))
            rows += [
                _row("privmix, texts", count, each, clip, next(gains))
                for each, clip in zip(epsilon, clips, strict=True)
            ]
    result = {"users": len(users), "tokens": total, "texts": len(users) // DRAWN, "methods": rows}
    show(result, as_json)


def _radius(parts: int, **limits: float) -> float:
    return ExponentialSettings.model_validate(limits).plan(parts).radius


def _row(method: str, parts: int, epsilon: float, clip: float, gain: float) -> dict[str, Any]:
    return {"method": method, "parts": parts, "epsilon": epsilon, "clip": round(clip, 3), "gain": round(gain, 3)}


def _prompts(model: AdaptedModel, references: Sequence[Tensor], sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits after references in the prompt: the sequence attends to its reference at all positions."""
    cache = model.record(sequence[None, :1])
    public = model.logits(PUBLIC, sequence[None], len(sequence), cache)[0]
    whole = [torch.cat([reference, sequence])[None] for reference in references]
    return public, torch.stack([model.logits(PUBLIC, each, len(sequence), cache)[0] for each in whole])


def _load(model: AdaptedModel, texts: Sequence[np.ndarray], size: int, folder: Path) -> list[str]:
    """Loads the first `size` tokens of the texts of parts and returns their names."""
    names = [f"{folder.name}-{part}" for part in range(len(texts))]
    for name, tokens in zip(names, texts, strict=True):
        write_files(folder / name, text_files(tokens, size))
        model.load(name, AdapterFiles(folder / name, "text"))
    return names


def _rows(model: AdaptedModel, names: Sequence[str], sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Returns logits of texts as privmix serves them: the public model's cache of the sequence has not read them."""
    count, cache = len(sequence), model.record(sequence[None])
    public, *rows = (model.logits(name, sequence[None], count, cache)[0] for name in (PUBLIC, *names))
    return public, torch.stack(rows)


def _gains(
    sequences: Tensor, logits_of: Callable[[Tensor], tuple[Tensor, Tensor]], mechanisms: Sequence[Mechanism]
) -> list[float]:
    """Returns the gain of each mechanism over the public model, over tokens that a protocol can release."""
    gains: list[list[Tensor]] = [[] for _ in mechanisms]
    for sequence in sequences:
        public, rows = logits_of(sequence)
        public, rows, truth = public[:-1], rows[:, :-1], sequence[1:, None]
        known = public.log_softmax(-1).gather(1, truth)[:, 0]
        possible = known.exp() >= SUPPORT_FLOOR
        for own, mechanism in zip(gains, mechanisms, strict=True):
            own.append((mechanism(public, rows).gather(1, truth)[:, 0] - known)[possible])
    return [float(torch.cat(own).mean()) for own in gains]


def _invisible_ink(clip: float) -> Mechanism:
    """Vinod et al. 2025, difference clipping: the public logits plus the mean of the clipped differences of logits."""
    return lambda public, rows: (public + (rows - public).clamp(-clip, clip).mean(0)).log_softmax(-1)


def _amin(clip: float) -> Mechanism:
    """Amin et al. 2024: the mean of the references' logits, each shifted to the maximum `clip` and cut at -clip."""
    return lambda public, rows: (rows - rows.amax(-1, keepdim=True) + clip).clamp(-clip, clip).mean(0).log_softmax(-1)


def _exponential(clip: float) -> Mechanism:
    protocol = ExponentialSettings(radius=clip, epsilon=None).plan(DRAWN)

    def released(public: Tensor, rows: Tensor) -> Tensor:
        count = len(public)
        by_token = rows.transpose(0, 1).log_softmax(-1).reshape(count * DRAWN, -1)
        answers = shape(public.log_softmax(-1), by_token, (tuple(range(DRAWN)),) * count, overwrite_parts=True)
        return protocol.release_law(answers).log().float()

    return released


if __name__ == "__main__":
    typer.run(benchmark)
