"""Audits with one run: a fair coin includes or excludes each of many users, and the attacker guesses the coins.

One ensemble is enough, because every coin is an independent trial (Steinke, Nasr, Jagielski 2023). Differential privacy
limits the number of correct guesses, which bounds epsilon from below (`bounds.one_run_epsilon`).

Mahloujifar, Melis, Chaudhuri 2024 use the whole trade-off curve. Here it is the curve of the claim's dominating pair:
the audit reports the largest number of tokens of the event whose curve the guesses rule out.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray

from privmix.laboratory.audit import distributions, likelihood
from privmix.laboratory.audit.bounds import TradeOff, f_one_run_p_value, one_run_epsilon
from privmix.laboratory.audit.chances import release
from privmix.laboratory.audit.finding import CERTAIN, Finding
from privmix.laboratory.audit.local_models import ModelOutput
from privmix.laboratory.audit.testbed import Testbed
from privmix.privacy.arrays import Reals
from privmix.privacy.events import Event
from privmix.privacy.protocol import Protocol
from privmix.privacy.sampling.categorical import sample
from privmix.privacy.worlds import Pair, World

ATTACK, F_ATTACK = "one-run audit", "one-run audit by the trade-off curve"
_ORDER = 2.0
# The search tries up to this multiple of the claimed number of tokens, so that a bound can exceed the claim.
_MAX_TIMES = 4
# The grid of privacy losses. This coarse grid gives slightly weaker bounds and composes ten times faster.
_INTERVAL = 1e-3


def of_parts(
    protocol: Protocol, *, queries: int, delta: float, confidence: float, guesses: int, subject: str | None = None
) -> list[Finding]:
    """Audits planted parts. A part's coin chooses one of two worst-case models, which ``queries`` queries attack.

    Returns:
        the finding by (epsilon, delta), and the finding by the trade-off curve if the event has one.

    Raises:
        NoPairError: no worst case is known for this protocol.
    """
    guessed = guess_parts(protocol, queries, guesses)
    return findings(protocol, guessed, queries * protocol.parts, delta, confidence, subject or protocol.name)


def of_users(
    protocol: Protocol,
    testbed: Testbed,
    *,
    queries: int,
    delta: float,
    confidence: float,
    guesses: int,
    subject: str | None = None,
) -> list[Finding]:
    """Audits the planted users of a trained testbed. Samples each token of their secrets ``queries`` times.

    Raises:
        InputError: the testbed lacks the protocol's models.
    """
    models = testbed.models(protocol)
    scores = [
        _surprise(protocol, outputs, models, canary.length, queries) for canary, outputs in testbed.outputs.items()
    ]
    tokens = queries * sum(canary.length for canary in testbed.outputs)
    coins = [canary.included for canary in testbed.outputs]
    guessed = GuessCounts(len(coins), guesses, correct_guesses(coins, np.array(scores), guesses))
    return findings(protocol, guessed, tokens, delta, confidence, subject or protocol.name)


@dataclass(frozen=True)
class GuessCounts:
    """The numbers of planted coins, of guesses, and of correct guesses."""

    planted: int
    guesses: int
    correct: int


def correct_guesses(coins: Sequence[bool], scores: Reals, guesses: int) -> int:
    """Guesses that the highest scores belong to included users and the lowest to others; counts correct guesses."""
    order = np.argsort(scores, kind="stable")
    included = np.asarray(coins)[order]
    half = guesses // 2
    return int((~included[:half]).sum() + included[len(included) - (guesses - half) :].sum())


def _attacked(pair: Pair, part: int, coin: bool) -> World:
    """Returns the world of the queries that attack one part: that part is replaced, the others are the worst case."""
    world = pair.before if coin else pair.after
    *others, own = world.parts
    return replace(world, parts=(*others[:part], own, *others[part:]))


def _surprise(protocol: Protocol, outputs: ModelOutput, models: Sequence[int], length: int, queries: int) -> float:
    """Returns the count of the secret's tokens in samples, minus the count expected from the public model."""
    own = slice(0, length)  # the first candidate is the true secret
    public = torch.softmax(outputs.public[own].double(), dim=1).gather(1, outputs.wanted[own, None])[:, 0].numpy()
    samples = np.array([_sampled(protocol, outputs, models, own) for _ in range(queries)])
    return float(((samples == outputs.wanted[own].numpy()) - public).sum())


def _sampled(protocol: Protocol, outputs: ModelOutput, models: Sequence[int], block: slice) -> NDArray[np.int64]:
    return np.array(sample(release(protocol, outputs, models, block).weights))


def guess_parts(protocol: Protocol, queries: int, guesses: int) -> GuessCounts:
    """Flips a fair coin for every part, and guesses the coins from the tokens of the part's own queries.

    Raises:
        NoPairError: no worst case is known for this protocol.
    """
    pair = distributions.worst_pair(protocol, protocol.event, _ORDER)
    coins = [secrets.choice((True, False)) for _ in range(protocol.parts)]
    ratio = distributions.log_ratio(*distributions.pair_laws(protocol, pair))
    scores = [
        ratio[distributions.tokens(protocol, _attacked(pair, part, coin), queries)].sum()
        for part, coin in enumerate(coins)
    ]
    return GuessCounts(len(coins), guesses, correct_guesses(coins, np.array(scores), guesses))


def findings(
    protocol: Protocol, guessed: GuessCounts, tokens: int, delta: float, confidence: float, subject: str
) -> list[Finding]:
    """Compares the guesses with the protocol's claim for all released tokens."""
    claims = likelihood.claims_of(protocol.event, tokens, delta)

    def finding(attack: str, notion: str, bound: Callable[[float], float]) -> Finding:
        return Finding(
            attack=attack,
            subject=subject,
            status=protocol.guarantee.status,
            claims=claims,
            delta=delta,
            lower=bound(confidence),
            confidence=confidence,
            certain=bound(CERTAIN),
            details={
                "adjacency": protocol.event.adjacency,
                "notion": notion,
                "tokens": tokens,
                "planted": guessed.planted,
                "guesses": guessed.guesses,
                "correct": guessed.correct,
                "parts": protocol.parts,
            },
        )

    results = [
        finding(
            ATTACK,
            "(epsilon, delta)",
            lambda level: one_run_epsilon(guessed.planted, guessed.guesses, guessed.correct, delta, level),
        )
    ]
    if protocol.event.pld() is not None:
        results.append(
            finding(F_ATTACK, "trade-off curve", lambda level: f_epsilon(protocol.event, guessed, tokens, delta, level))
        )
    return results


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
