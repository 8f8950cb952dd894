"""Audits with one run: a fair coin includes or excludes each of many users, and the attacker guesses the coins.

One ensemble is enough, because every coin is an independent trial (Steinke, Nasr, Jagielski 2023). Differential privacy
limits the number of correct guesses, which bounds epsilon from below (`bounds.one_run_epsilon`).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from privmix.laboratory.audit.bounds import one_run_epsilon
from privmix.laboratory.audit.extraction import planned
from privmix.laboratory.audit.finding import CERTAIN, Finding
from privmix.laboratory.audit.local_models import ModelOutput
from privmix.laboratory.audit.testbed import Testbed
from privmix.privacy.accounting import planning
from privmix.privacy.arrays import Reals
from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocol import Protocol
from privmix.privacy.sampling.categorical import sample
from privmix.privacy.settings import Settings


def of_users(
    name: str, settings: Settings, testbed: Testbed, *, queries: int, confidence: float, guesses: int
) -> Finding:
    """Audits the planted users of a trained testbed. Samples each token of their secrets ``queries`` times.

    Raises:
        InputError: the budget leaves the protocol nothing, or the testbed lacks its models.
    """
    protocol = planned(settings, testbed.parts)
    models = testbed.models(protocol)
    scores = [_surprise(protocol, outputs, models, queries) for outputs in testbed.outputs.values()]
    coins = [canary.included for canary in testbed.outputs]
    guessed = GuessCounts(len(coins), guesses, correct_guesses(coins, np.array(scores), guesses))
    return finding(name, protocol, guessed, tokens_of(testbed, queries), settings.delta, confidence)


def tokens_of(testbed: Testbed, queries: int) -> int:
    """Returns the number of tokens that ``queries`` queries for each token of each secret release."""
    return queries * sum(canary.length for canary in testbed.outputs)


@dataclass(frozen=True)
class GuessCounts:
    """The numbers of planted coins, of guesses, and of correct guesses."""

    planted: int
    guesses: int
    correct: int


def correct_guesses(coins: ArrayLike, scores: Reals, guesses: int) -> int:
    """Guesses that the highest scores belong to included users and the lowest to others; counts correct guesses."""
    order = np.argsort(scores, kind="stable")
    included = np.asarray(coins, np.bool_)[order]
    half = guesses // 2
    return int((~included[:half]).sum() + included[len(included) - (guesses - half) :].sum())


def _surprise(protocol: Protocol, outputs: ModelOutput, models: Sequence[int], queries: int) -> float:
    """Returns the count of the secret's tokens in samples, minus the count expected from the public model."""
    public = torch.softmax(outputs.public.double(), dim=1).gather(1, outputs.wanted[:, None])[:, 0].numpy()
    samples = np.array([_sampled(protocol, outputs, models) for _ in range(queries)])
    return float(((samples == outputs.wanted.numpy()) - public).sum())


def _sampled(protocol: Protocol, outputs: ModelOutput, models: Sequence[int]) -> NDArray[np.int64]:
    """Draws parts for each query of a secret, releases once, and samples a token."""
    drawn = [protocol.draw() for _ in range(len(outputs.public))]
    own = [outputs.models[models[part], query] for query, parts in enumerate(drawn) for part in parts]
    answers = shape(outputs.public, torch.stack(own) if own else outputs.public[:0], drawn)
    return np.array(sample(protocol.distribution(answers).weights))


def finding(
    name: str, protocol: Protocol, guessed: GuessCounts, tokens: int, delta: float, confidence: float
) -> Finding:
    """Compares the guesses with the protocol's claim for all released tokens."""
    lower, certain = (
        one_run_epsilon(guessed.planted, guessed.guesses, guessed.correct, delta, level)
        for level in (confidence, CERTAIN)
    )
    return Finding(
        attack="one-run audit",
        subject=name,
        status=protocol.guarantee.status,
        adjacency=protocol.event.adjacency,
        claim=planning.cost(protocol.event, tokens, delta).epsilon,
        delta=delta,
        lower=lower,
        confidence=confidence,
        certain=certain,
        details={"tokens": tokens, **asdict(guessed)},
    )
