"""Writes synthetic hidden states of an evaluation, for models that are closer to log_p other than to the public one."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from privmix.laboratory.evaluation.rows import EnsembleRows, writing
from privmix.laboratory.evaluation.scoring import Head

VOCABULARY = 96


@dataclass(frozen=True)
class StoredRows:
    """Files of hidden states and the distributions in them.

    Attributes:
        public: log-probabilities of the public model [P, V].
        models: log-probabilities of the models [P, M, V].
        tokens: true tokens [P], sampled from the models' mean.
    """

    files: EnsembleRows
    public: Tensor
    models: Tensor
    tokens: NDArray[np.int64]


def write_rows(folder: Path, positions: int, models: int, apart: float = 0.3) -> StoredRows:
    """Writes the files of ``models`` models at ``positions`` positions, about ``apart`` nats from log_p other."""
    generator = torch.Generator().manual_seed(0)
    public = (2 * torch.randn(positions, VOCABULARY, generator=generator)).log_softmax(1)
    common = public + torch.randn(positions, VOCABULARY, generator=generator)
    log_p = common[:, None] + apart * torch.randn(positions, models, VOCABULARY, generator=generator)
    log_p = log_p.log_softmax(2)
    models_files = tuple(folder / f"model-{index}.npy" for index in range(models))
    files = EnsembleRows(folder / "head.safetensors", folder / "public.npy", models_files)
    Head(torch.eye(VOCABULARY), None, narrow=False).save(files.head)  # hidden states are the log-probabilities
    with writing(files.public, (positions, VOCABULARY)) as put:
        put(0, public)
    for index, path in enumerate(files.models):
        with writing(path, (positions, VOCABULARY)) as put:
            put(0, log_p[:, index])
    tokens = torch.multinomial(log_p.exp().mean(dim=1), 1, generator=generator)[:, 0].numpy()
    return StoredRows(files, public, log_p, tokens)
