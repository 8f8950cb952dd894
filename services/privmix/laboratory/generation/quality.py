"""Measures the quality of texts: variety, perplexity, a classifier's accuracy, and closeness to real text.

It compares private synthetic text, the public model's continuations of the same prompts and, for the operator, the real
text. Measurements on the real text are private: they depend on it and have no guarantee.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from privmix.engine.engine import AdapterFiles
from privmix.laboratory.evaluation.options import Precision
from privmix.laboratory.evaluation.scoring import Scorer
from privmix.laboratory.evaluation.text import Block
from privmix.privacy.arrays import Reals

NGRAMS = (1, 2, 3)
MIN_FOR_MAUVE = 100
"""The minimum number of texts of a set for MAUVE: it yields ten buckets. The authors use thousands of texts."""
COPIED_WORDS = 8
"""The number of consecutive words that counts as copied; shorter sequences are often common phrases."""
_TOKENS = 512  # the maximum number of tokens of a text that a model reads
_SCALING, _POINTS, _BUCKET, _VARIANCE = 5.0, 25, 10, 0.9  # MAUVE's constants
_DRAWS = 8
"""MAUVE is a mean over draws: near zero, one differs from the next by half."""


@dataclass(frozen=True)
class Variety:
    """Holds distinct-n, the fraction of distinct n-grams in the same number of words of every set (Li et al. 2016)."""

    words: int
    distinct: Mapping[int, float]


@dataclass(frozen=True)
class Lengths:
    """Holds the mean and the 5, 50 and 95 % quantiles of the number of words in a text."""

    mean: float
    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Utility:
    """Holds the accuracy of a classifier (TF-IDF, logistic regression) on real text outside the training sets."""

    accuracy: float
    trained_on: int
    tested_on: int
    majority: float


@dataclass(frozen=True)
class PrivateTextOverlap:
    """Measures how close a set is to the private text.

    Attributes:
        copied: the fraction of texts with `COPIED_WORDS` consecutive words of the real text.
        nearest_mean, nearest_high: the mean and the 95th percentile of the TF-IDF cosine with the nearest real text.
    """

    copied: float
    nearest_mean: float
    nearest_high: float


def lengths(texts: Sequence[str]) -> Lengths:
    counts = [len(text.split()) for text in texts]
    low, median, high = np.quantile(counts, (0.05, 0.5, 0.95))
    return Lengths(float(np.mean(counts)), float(low), float(median), float(high))


def variety(sets: Mapping[str, Sequence[str]]) -> dict[str, Variety]:
    """Computes distinct-n on the first words of every set, as many as in the shortest set: it falls with length."""
    streams = {name: [word for text in texts for word in text.lower().split()] for name, texts in sets.items()}
    count = min(map(len, streams.values()))
    return {name: Variety(count, _distinct(words[:count])) for name, words in streams.items()}


def _distinct(words: Sequence[str]) -> dict[int, float]:
    fractions = {}
    for n in NGRAMS:
        grams = list(zip(*(islice(words, start, None) for start in range(n)), strict=False))
        fractions[n] = len(set(grams)) / len(grams) if grams else 0.0
    return fractions


class PerplexityModel:
    """Computes the perplexity of texts, with or without an adapter, and their features.

    Args:
        precision: the precision for perplexities; `auto` chooses the fastest on this machine.
    """

    def __init__(self, model: Path, precision: Precision = "auto") -> None:
        from transformers import AutoTokenizer  # slow to import

        self._model = model
        self._precision = precision
        self._tokenizer = AutoTokenizer.from_pretrained(model)
        self._scorer: Scorer | None = None

    def perplexity(self, texts: Sequence[str], adapter: AdapterFiles | None = None) -> float:
        """Returns the perplexity of all texts together: exp of the mean loss in nats; inf if there are no tokens."""
        if self._scorer is None:
            self._scorer = Scorer(self._model, self._precision)
        blocks = [block for text in texts if len((block := self._block(text)).tokens) > 1]
        loss, count = 0.0, 0
        for _, index, first, rows in self._scorer.log_probabilities(blocks, [adapter] if adapter else []):
            targets = blocks[index].targets[first : first + len(rows)]
            truth = torch.tensor([blocks[index].tokens[target] for target in targets], device=rows.device)
            loss -= float(rows.gather(1, truth[:, None]).double().sum())
            count += len(targets)
        return math.exp(loss / count) if count else math.inf

    @torch.inference_mode()
    def features(self, texts: Sequence[str]) -> Reals:
        """Returns the last layer at the last token of each text, float64 [texts, hidden]."""
        from transformers import AutoModel

        network, features = AutoModel.from_pretrained(self._model).eval(), []
        for text in texts:
            tokens = torch.tensor([self._block(text).tokens])
            features.append(network(input_ids=tokens).last_hidden_state[0, -1].double().numpy())
        return np.stack(features)

    def _block(self, text: str) -> Block:
        tokens = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"][
            :_TOKENS
        ]
        whole = (self._tokenizer.eos_token_id, *tokens)  # in training, a document follows this token
        return Block(whole, tuple(range(1, len(whole))))


@dataclass(frozen=True)
class Likeness:
    """Holds MAUVE of several sets of texts and the real ones.

    Attributes:
        texts: how many of each set, and of the real ones, are compared; None if no set has enough.
        scores: by the set's name; a set with fewer than `MIN_FOR_MAUVE` texts has none.
    """

    texts: int | None
    scores: Mapping[str, float]

    @classmethod
    def of(cls, sets: Mapping[str, Reals], real: Reals) -> "Likeness":
        """Compares equally many texts of each set, because the score falls with the number of texts.

        Args:
            sets: features [texts, hidden] by name.
            real: features [texts, hidden].
        """
        enough = {name: rows for name, rows in sets.items() if min(len(rows), len(real)) >= MIN_FOR_MAUVE}
        if not enough:
            return cls(None, {})
        count = min(len(real), *map(len, enough.values()))
        return cls(count, {name: mauve(rows, real, count) for name, rows in enough.items()})


def mauve(ours: Reals, real: Reals, count: int) -> float:
    """Returns MAUVE of two sets of features [texts, hidden], between 0 and 1 (Pillutla et al. 2021, Section 3).

    The features are quantised together by k-means after PCA, and the score is the area under the divergence curve of
    the two histograms, as a mean over `_DRAWS` draws of the texts and of the first centres of k-means. Values are
    comparable only for the same features and numbers of texts.

    Args:
        count: how many texts of each to compare, drawn by fixed seeds.
    """
    return float(np.mean([_mauve_of_draw(ours, real, count, seed) for seed in range(_DRAWS)]))


def _mauve_of_draw(ours: Reals, real: Reals, count: int, seed: int) -> float:
    from sklearn.cluster import KMeans
    from sklearn.decomposition import PCA
    from sklearn.preprocessing import normalize

    rng = np.random.default_rng(seed)
    both = np.concatenate([features[rng.permutation(len(features))[:count]] for features in (ours, real)])
    reduced = PCA(n_components=_VARIANCE, whiten=False, random_state=seed).fit_transform(normalize(both))
    buckets = max(2, round(count / _BUCKET))
    labels = KMeans(buckets, n_init=5, random_state=seed).fit_predict(reduced)
    p, q = (np.bincount(part, minlength=buckets) / count for part in (labels[:count], labels[count:]))
    return divergence_area(p, q)


def divergence_area(p: Reals, q: Reals) -> float:
    """Returns the area under the curve (exp(-c KL(q|r)), exp(-c KL(p|r))) of two histograms over mixtures r."""
    weights = np.linspace(1e-6, 1 - 1e-6, _POINTS)
    mixtures = [weight * p + (1 - weight) * q for weight in weights]
    x = [0.0, *(math.exp(-_SCALING * _kl(q, mixture)) for mixture in reversed(mixtures)), 1.0]
    y = [1.0, *(math.exp(-_SCALING * _kl(p, mixture)) for mixture in reversed(mixtures)), 0.0]
    # Averages both directions, which differ only by the numerical integration.
    return float((_area(x, y) + _area(y[::-1], x[::-1])) / 2)


def _area(x: Sequence[float], y: Sequence[float]) -> float:
    return float(np.trapezoid(y, x))


def _kl(p: Reals, q: Reals) -> float:
    support = p > 0
    return float(np.sum(p[support] * np.log(p[support] / q[support])))


def utility(train: Sequence[tuple[str, str]], test: Sequence[tuple[str, str]]) -> Utility | None:
    """Trains a classifier on (text, label) pairs and tests it on real ones; None if there is only one label."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    if len({label for _, label in train}) < 2 or not test:
        return None
    texts, labels = zip(*train, strict=True)
    model = make_pipeline(TfidfVectorizer(ngram_range=(1, 2)), LogisticRegression(max_iter=1000))
    model.fit(texts, labels)
    test_texts, truth = zip(*test, strict=True)
    accuracy = float(np.mean(model.predict(test_texts) == np.array(truth)))
    majority = max(truth.count(label) for label in set(truth)) / len(truth)
    return Utility(accuracy, len(train), len(test), majority)


def overlap(texts: Sequence[str], real: Sequence[str]) -> PrivateTextOverlap:
    """Measures how close texts are to the real texts. A text that is among them has the maximum closeness."""
    from sklearn.feature_extraction.text import TfidfVectorizer

    known = {gram for text in real for gram in _grams(text)}
    copied = float(np.mean([any(gram in known for gram in _grams(text)) for text in texts]))
    vectors = TfidfVectorizer().fit([*real, *texts])
    cosines = (vectors.transform(texts) @ vectors.transform(real).T).max(axis=1).toarray().ravel()
    return PrivateTextOverlap(copied, float(cosines.mean()), float(np.quantile(cosines, 0.95)))


def _grams(text: str) -> set[tuple[str, ...]]:
    words = text.lower().split()
    return set(zip(*(islice(words, start, None) for start in range(COPIED_WORDS)), strict=False))
