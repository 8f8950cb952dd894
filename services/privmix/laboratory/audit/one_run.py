"""Audits with one run: a fair coin includes or excludes each of many users, and the attacker guesses the coins.

One ensemble is enough, because every coin is an independent trial (Steinke, Nasr, Jagielski 2023). Differential privacy
limits the number of correct guesses, which bounds epsilon from below (`bounds.one_run_epsilon`).

Mahloujifar, Melis, Chaudhuri 2024 use the whole trade-off curve. Here it is the curve of the claim's dominating pair:
the audit reports the largest number of tokens of the event whose curve the guesses rule out.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np
import torch
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import ArrayLike, NDArray

from privmix.laboratory.audit.bounds import TradeOff, f_one_run_p_value, one_run_epsilon
from privmix.laboratory.audit.extraction import planned
from privmix.laboratory.audit.finding import CERTAIN, Finding
from privmix.laboratory.audit.local_models import ModelOutput
from privmix.laboratory.audit.testbed import Testbed
from privmix.privacy.accounting import planning
from privmix.privacy.arrays import Reals
from privmix.privacy.events import Event
from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocol import Protocol
from privmix.privacy.sampling.categorical import sample
from privmix.privacy.settings import Settings

# The search tries up to this multiple of the claimed number of tokens, so that a bound can exceed the claim.
_MAX_TIMES = 4
# The grid of privacy losses. This coarse grid gives slightly weaker bounds and composes ten times faster.
_INTERVAL = 1e-3


def of_users(
    name: str, settings: Settings, testbed: Testbed, *, queries: int, confidence: float, guesses: int
) -> list[Finding]:
    """Audits the planted users of a trained testbed. Samples each token of their secrets ``queries`` times.

    Raises:
        InputError: the budget leaves the protocol nothing, or the testbed lacks its models.
    """
    protocol = planned(settings, testbed.parts)
    models = testbed.models(protocol)
    scores = [
        _surprise(protocol, outputs, models, canary.length, queries) for canary, outputs in testbed.outputs.items()
    ]
    coins = [canary.included for canary in testbed.outputs]
    guessed = GuessCounts(len(coins), guesses, correct_guesses(coins, np.array(scores), guesses))
    return findings(name, protocol, guessed, tokens_of(testbed, queries), settings.delta, confidence)


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


def _surprise(protocol: Protocol, outputs: ModelOutput, models: Sequence[int], length: int, queries: int) -> float:
    """Returns the count of the secret's tokens in samples, minus the count expected from the public model."""
    own = slice(0, length)  # the first candidate is the true secret
    public = torch.softmax(outputs.public[own].double(), dim=1).gather(1, outputs.wanted[own, None])[:, 0].numpy()
    samples = np.array([_sampled(protocol, outputs, models, own) for _ in range(queries)])
    return float(((samples == outputs.wanted[own].numpy()) - public).sum())


def _sampled(protocol: Protocol, outputs: ModelOutput, models: Sequence[int], block: slice) -> NDArray[np.int64]:
    """Draws parts for each query of a block, releases once, and samples a token."""
    public, rows = outputs.public[block], outputs.models[:, block]
    drawn = [protocol.draw() for _ in range(len(public))]
    own = [rows[models[part], query] for query, parts in enumerate(drawn) for part in parts]
    answers = shape(public, torch.stack(own) if own else public[:0], drawn)
    return np.array(sample(protocol.distribution(answers).weights))


def findings(
    name: str, protocol: Protocol, guessed: GuessCounts, tokens: int, delta: float, confidence: float
) -> list[Finding]:
    """Compares the guesses with the protocol's claim for all released tokens.

    Returns:
        the finding by (epsilon, delta), and the finding by the trade-off curve if the event has one.
    """
    event = protocol.event
    bounds: dict[str, Callable[[float], float]] = {
        "(epsilon, delta)": lambda level: one_run_epsilon(
            guessed.planted, guessed.guesses, guessed.correct, delta, level
        )
    }
    if event.pld() is not None:
        bounds["trade-off curve"] = lambda level: f_epsilon(event, guessed, tokens, delta, level)
    return [
        Finding(
            attack=f"one-run audit by {notion}",
            subject=name,
            status=protocol.guarantee.status,
            adjacency=event.adjacency,
            claim=planning.cost(event, tokens, delta).epsilon,
            delta=delta,
            lower=bound(confidence),
            confidence=confidence,
            certain=bound(CERTAIN),
            details={"tokens": tokens, **asdict(guessed)},
        )
        for notion, bound in bounds.items()
    ]


def f_epsilon(event: Event, guessed: GuessCounts, tokens: int, delta: float, confidence: float) -> float:
    """Bounds epsilon from below for a mechanism with the trade-off curve of some number of tokens of the event.

    Returns:
        epsilon at ``delta`` of the largest number of tokens whose curve the guesses rule out at ``confidence``; 0 if
        they rule out none.
    """

    def ruled_out(count: int) -> bool:
        curve = TradeOff.of_pld(_composed(event, count))
        return f_one_run_p_value(curve, guessed.planted, guessed.guesses, guessed.correct) <= 1 - confidence

    if not ruled_out(1):
        return 0.0
    low, high = 1, _MAX_TIMES * tokens
    while high - low > max(1, low // 50):
        middle = max(low + 1, round((low * high) ** 0.5))
        low, high = (middle, high) if ruled_out(middle) else (low, middle)
    return float(_composed(event, low).get_epsilon_for_delta(delta))


@lru_cache(maxsize=64)
def _composed(event: Event, tokens: int) -> PrivacyLossDistribution:
    """Composes with dp-accounting alone, because the audit also attacks our accountant."""
    pld = event.pld(_INTERVAL)
    assert pld is not None  # `findings` skips other events
    return pld.self_compose(tokens)
