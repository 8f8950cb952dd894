"""Hidden states made by hand, as an evaluation keeps them: models nearer to each other than to the public one."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.evaluation.rows import EnsembleRows, writing
from services.evaluation.scoring import Head

VOCABULARY = 96


@dataclass(frozen=True)
class Written:
    """Files, and the log-probabilities that they hold: `public` [P, V], `models` [P, M, V]; `tokens` [P] drawn of the
    models' mean."""

    files: EnsembleRows
    public: Tensor
    models: Tensor
    tokens: NDArray[np.int64]


def write_rows(folder: Path, positions: int, models: int, apart: float = 0.3) -> Written:
    """`apart` is how far models are from each other, in nats."""
    generator = torch.Generator().manual_seed(0)
    public = (2 * torch.randn(positions, VOCABULARY, generator=generator)).log_softmax(1)
    common = public + torch.randn(positions, VOCABULARY, generator=generator)
    each = common[:, None] + apart * torch.randn(positions, models, VOCABULARY, generator=generator)
    each = each.log_softmax(2)
    models_files = tuple(folder / f"model-{index}.npy" for index in range(models))
    files = EnsembleRows(folder / "head.safetensors", folder / "public.npy", models_files)
    Head(torch.eye(VOCABULARY), None, narrow=False).save(files.head)  # hidden states are the log-probabilities
    with writing(files.public, (positions, VOCABULARY)) as put:
        put(0, public)
    for index, path in enumerate(files.models):
        with writing(path, (positions, VOCABULARY)) as put:
            put(0, each[:, index])
    tokens = torch.multinomial(each.exp().mean(dim=1), 1, generator=generator)[:, 0].numpy()
    return Written(files, public, each, tokens)
