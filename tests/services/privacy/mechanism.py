"""Computes exact distributions of released tokens: the serving code's release for every subset of the parts."""

from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray

from privmix.privacy.mollifiers.shaping import SamplingOptions, shape
from privmix.privacy.protocol import Protocol

Rows = NDArray[np.float64]


def subsets(parts: int) -> list[tuple[int, ...]]:
    return [subset for size in range(parts + 1) for subset in combinations(range(parts), size)]


def released(protocol: Protocol, public: Rows, parts: Rows, models: Sequence[tuple[int, ...]]) -> Rows:
    """Returns the weights that are released for one query and each set of models, Python integers [len(models), V]."""
    rows = [parts[i] for drawn in models for i in drawn]
    answers = shape(
        torch.tensor(np.broadcast_to(public, (len(models), len(public))), dtype=torch.float32),
        torch.tensor(np.array(rows).reshape(len(rows), len(public)), dtype=torch.float32),
        models,
        SamplingOptions(),
    )
    return protocol.distribution(answers).weights.numpy().astype(object)


def all_drawn(protocol: Protocol, publics: Rows, parts: Rows) -> Rows:
    """Returns the distributions of released tokens [n, V] for n queries, of all parts.

    Args:
        publics: log-probabilities [n, V].
        parts: log-probabilities [n, N, V].
    """
    models = [tuple(range(parts.shape[1]))] * len(publics)
    rows = torch.tensor(parts, dtype=torch.float32).flatten(0, 1)
    answers = shape(torch.tensor(publics, dtype=torch.float32), rows, models, SamplingOptions())
    return normalised(protocol.distribution(answers).weights.numpy().astype(object))


def token_distribution(protocol: Protocol, public: Rows, parts: Rows) -> Rows:
    """Returns the distribution of a released token [V]: the mean of the releases over the draws."""
    chances = protocol.draws((1,) * len(parts))
    models = [tuple(index for index, count in enumerate(drawn) if count) for drawn in chances]
    return np.asarray(np.array(list(chances.values())) @ normalised(released(protocol, public, parts, models)))


def normalised(weights: Rows) -> Rows:
    """Normalizes integer weights [n, V] to distributions, float64."""
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float64)


def renyi_divergence(p: Rows, q: Rows, order: float) -> float:
    kept = q > 0
    p, q = p[kept], q[kept]
    return float(np.log(np.sum(q * (p / q) ** order)) / (order - 1))


def hockey_stick(p: Rows, q: Rows, epsilon: float) -> float:
    return float(np.maximum(0, p - np.exp(epsilon) * q).sum())


def climb(
    objective: Callable[[Rows], float], shape: tuple[int, ...], rounds: int, rng: np.random.Generator
) -> tuple[float, Rows]:
    """Returns the largest objective that random steps of many sizes reach from a random start."""
    best_at = rng.normal(scale=3, size=shape)
    best = objective(best_at)
    for _ in range(rounds):
        step = rng.normal(scale=10 ** rng.uniform(-2, 1), size=shape) * (rng.random(shape) < 0.5)
        value = objective(best_at + step)
        if value > best:
            best, best_at = value, best_at + step
    return best, best_at


def log_softmax(logits: Rows) -> Rows:
    """Returns rows of log-probabilities. Bounds the logits, so that every token stays above the support floor."""
    bounded = np.clip(logits, -11, 11)
    return np.asarray(bounded - np.log(np.exp(bounded).sum(axis=-1, keepdims=True)))
