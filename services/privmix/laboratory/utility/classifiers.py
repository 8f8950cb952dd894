"""Trains classifiers on embeddings and scores them: accuracy and macro-F1, with bootstrap intervals.

Each repetition draws training texts with replacement, and held-out users with replacement with all of their texts
(Efron 1979). So the interval covers both the choice of the training texts and that of the held-out people. A repetition
draws the same people for every training set, so sets are compared repetition by repetition.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from privmix.privacy.arrays import Integers, Reals

# Maps training rows [n, hidden], their classes [n], rows to classify [k, hidden] and a seed to classes [k].
Classifier = Callable[[Reals, Integers, Reals, int], Integers]

_INTERVAL = (0.025, 0.975)
_HIDDEN, _STEPS, _BATCH, _RATE, _DECAY = 128, 200, 128, 3e-3, 1e-2


@dataclass(frozen=True)
class Score:
    """Holds the mean over all repetitions, and their quantiles at 2.5 and 97.5 %."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Score":
        low, high = np.quantile(values, _INTERVAL)
        return cls(float(np.mean(values)), float(low), float(high))


@dataclass(frozen=True)
class Scores:
    """Holds the scores of one classifier on held-out text.

    Attributes:
        macro_f1: the mean over the held-out text's classes.
        accuracies: of each repetition.
    """

    accuracy: Score
    macro_f1: Score
    accuracies: tuple[float, ...]

    def over(self, other: "Scores") -> Score:
        """Returns this accuracy less another training set's, repetition by repetition."""
        return Score.of(np.subtract(self.accuracies, other.accuracies).tolist())


@dataclass(frozen=True, eq=False)
class Examples:
    """Holds embedded texts.

    Attributes:
        rows: [texts, hidden].
        classes: [texts], numbers of classes.
        users: [texts], numbers of users.
    """

    rows: Reals
    classes: Integers
    users: Integers


def evaluate(train: Examples, held_out: Examples, classify: Classifier, *, seeds: int) -> Scores:
    """Scores a classifier on held-out text.

    Args:
        seeds: the number of repetitions.
    """
    accuracies, f1s = [], []
    for seed in range(seeds):
        for_texts, for_people = np.random.default_rng(seed).spawn(2)
        drawn = for_texts.integers(len(train.rows), size=len(train.rows))
        tested = _users_again(held_out.users, for_people)
        found = classify(train.rows[drawn], train.classes[drawn], held_out.rows, seed)[tested]
        truth = held_out.classes[tested]
        accuracies.append(float(np.mean(found == truth)))
        f1s.append(macro_f1(truth, found))
    return Scores(Score.of(accuracies), Score.of(f1s), tuple(accuracies))


def macro_f1(truth: Integers, found: Integers) -> float:
    """Returns the mean over the classes in `truth` of 2 TP / (2 TP + FP + FN), at least one of which is present."""
    return float(
        np.mean(
            [
                2 * np.sum((truth == label) & (found == label)) / (np.sum(truth == label) + np.sum(found == label))
                for label in np.unique(truth)
            ]
        )
    )


def logistic(rows: Reals, classes: Integers, wanted: Reals, seed: int) -> Integers:
    """Classifies by logistic regression. A training set of one class answers that class."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if len(np.unique(classes)) == 1:
        return np.full(len(wanted), classes[0])
    model = make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=500, random_state=seed))
    found: Integers = model.fit(rows, classes).predict(wanted)
    return found


def small_head(rows: Reals, classes: Integers, wanted: Reals, seed: int) -> Integers:
    """Classifies by a network of one hidden layer on the frozen embeddings, trained with AdamW."""
    mean, spread = rows.mean(axis=0), rows.std(axis=0) + 1e-6
    inputs, targets = _tensor((rows - mean) / spread), torch.from_numpy(classes)
    rng = np.random.default_rng(seed)
    with torch.random.fork_rng(), _one_thread():
        torch.manual_seed(seed)
        outputs = int(classes.max()) + 1
        network = nn.Sequential(nn.Linear(rows.shape[1], _HIDDEN), nn.ReLU(), nn.Linear(_HIDDEN, outputs))
        optimizer = torch.optim.AdamW(network.parameters(), lr=_RATE, weight_decay=_DECAY)
        for _ in range(_STEPS):
            batch = torch.from_numpy(rng.integers(len(inputs), size=min(len(inputs), _BATCH)))
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.cross_entropy(network(inputs[batch]), targets[batch]))
            optimizer.step()
    with torch.inference_mode():
        found: Integers = network(_tensor((wanted - mean) / spread)).argmax(dim=1).numpy()
    return found


CLASSIFIERS: Mapping[str, Classifier] = {"logistic regression": logistic, "small head": small_head}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Lets PyTorch use one thread: for small matrices, more cost more time to coordinate than they save."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _users_again(users: Integers, rng: np.random.Generator) -> Integers:
    """Draws users with replacement; returns the indices of all of their texts."""
    order = np.argsort(users, kind="stable")
    texts_of = np.split(order, np.flatnonzero(np.diff(users[order])) + 1)
    return np.concatenate([texts_of[user] for user in rng.integers(len(texts_of), size=len(texts_of))])


def _tensor(rows: Reals) -> torch.Tensor:
    return torch.from_numpy(rows.astype(np.float32))
