"""Computes exact distributions of released tokens: the serving code's release for every subset of the parts."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from privmix.privacy.mollifiers.shaping import SamplingOptions, shape
from privmix.privacy.protocol import Protocol, Release

Rows = NDArray[np.float64]


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


def token_distribution(protocol: Protocol, public: Rows, parts: Rows) -> Rows:
    """Returns the distribution of a released token [V]: the mean of the releases over the draws."""
    chances = protocol.draws((1,) * len(parts))
    models = [tuple(index for index, count in enumerate(drawn) if count) for drawn in chances]
    return np.asarray(np.array(list(chances.values())) @ normalised(released(protocol, public, parts, models)))


def laws(release: Release) -> Rows:
    """Returns the distributions of released tokens, float64 [S, V]."""
    return normalised(release.weights.numpy().astype(object))


def normalised(weights: Rows) -> Rows:
    """Normalizes integer weights [n, V] to distributions, float64."""
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float64)


def literally(h: Rows, p0: Rows, shares: Rows, order: float) -> tuple[Rows, list[float]]:
    """Computes SubMix's release and each part's charge from its models' distributions h [N, 2, V] and all lambdas."""

    def mixture(parts: list[int]) -> Rows:
        if not parts:
            return p0
        share = math.fsum(shares[i] for i in parts) / len(parts)
        mean = [math.fsum(h[i, half, x] for i in parts for half in (0, 1)) / (2 * len(parts)) for x in range(len(p0))]
        return share * np.array(mean) + (1 - share) * p0

    every = list(range(len(h)))
    released, charged = mixture(every), []
    for i in every:
        without = mixture([j for j in every if j != i])
        pairs = (released, without), (without, released)
        charged.append(max(math.log(math.fsum(p[p > 0] ** order * q[p > 0] ** (1 - order))) for p, q in pairs))
    return released, [loss / (order - 1) for loss in charged]


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


def random_rows(parts: int, vocabulary: int, seed: int = 0, scale: float = 2) -> tuple[Rows, Rows]:
    """Returns log-probabilities of the public model [V] and of the parts [parts, V]."""
    public, *others = log_softmax(np.random.default_rng(seed).normal(scale=scale, size=(parts + 1, vocabulary)))
    return public, np.array(others)


def log_softmax(logits: Rows) -> Rows:
    """Returns rows of log-probabilities. Bounds the logits, so that every token stays above the support floor."""
    bounded = np.clip(logits, -11, 11)
    return np.asarray(bounded - np.log(np.exp(bounded).sum(axis=-1, keepdims=True)))
