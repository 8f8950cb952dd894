"""Auditing with one run: many users, each included by a fair coin, and one attacker who guesses the coins.

Steinke, Nasr, Jagielski 2023. One ensemble is enough, because every coin is a trial of its own; what differential
privacy says of all guesses together bounds epsilon from below (`bounds.one_run_epsilon`).

Mahloujifar, Melis, Chaudhuri 2024 use the whole trade-off curve, which here is that of the claim's own dominating pair:
of all numbers of tokens of the event, the largest whose curve the guesses rule out.
"""

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from numpy.typing import NDArray

from services.audit.attacks import likelihood
from services.audit.report.bounds import TradeOff, f_one_run_p_value, one_run_epsilon
from services.audit.report.finding import CERTAIN, Finding
from services.audit.worlds import distributions
from services.audit.worlds.chances import release
from services.audit.worlds.models import ModelOutput
from services.audit.worlds.testbed import Testbed
from services.privacy.events import Event
from services.privacy.protocol import Protocol
from services.privacy.sampling.categorical import sample
from services.privacy.worlds import Pair, Reals, World

ATTACK, F_ATTACK = "one-run audit", "one-run audit by the trade-off curve"
_ORDER = 2.0
# Of the tokens claimed: up to so many times as many are tried, so that a claim can be exceeded.
_MOST_TIMES = 4
# Of the losses of the curves: a coarser grid allows a little more, and is composed ten times faster.
_INTERVAL = 1e-3


def of_parts(
    protocol: Protocol, *, queries: int, delta: float, confidence: float, guesses: int, subject: str | None = None
) -> list[Finding]:
    """Every part is planted, in the worst case, in ``queries`` queries of its own; its coin chooses one of two models.

    Returns:
        what the guesses say of (epsilon, delta), and what they say of the trade-off curve where the event has one.

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
    """The planted users of a trained testbed: what follows each beginning of their secret, sampled so many times.

    Raises:
        InputError: the testbed lacks the protocol's models.
    """
    models = testbed.models(protocol)
    scores = [
        _surprise(protocol, outputs, models, canary.secret, queries) for canary, outputs in testbed.outputs.items()
    ]
    tokens = queries * sum(len(canary.secret) for canary in testbed.outputs)
    coins = [canary.included for canary in testbed.outputs]
    guessed = Guessed(len(coins), guesses, correct_guesses(coins, np.array(scores), guesses))
    return findings(protocol, guessed, tokens, delta, confidence, subject or protocol.name)


@dataclass(frozen=True)
class Guessed:
    """How many coins were planted, how many of them guessed, and how many of those guesses are correct."""

    planted: int
    guesses: int
    correct: int


def correct_guesses(coins: Sequence[bool], scores: Reals, guesses: int) -> int:
    """Of the highest scores that they are of included ones, of the lowest that they are not: how many are right."""
    order = np.argsort(scores, kind="stable")
    included = np.asarray(coins)[order]
    half = guesses // 2
    return int((~included[:half]).sum() + included[len(included) - (guesses - half) :].sum())


def _attacked(pair: Pair, part: int, coin: bool) -> World:
    """In the queries of one part it is the one in question, and the others are those of the worst case."""
    world = pair.before if coin else pair.after
    *others, own = world.parts
    return replace(world, parts=(*others[:part], own, *others[part:]))


def _surprise(protocol: Protocol, outputs: ModelOutput, models: Sequence[int], secret: str, queries: int) -> float:
    """How much more often than from the public model the secret's next digit comes."""
    own = slice(0, len(secret))  # the first candidate is the true one
    public = torch.softmax(outputs.public[own].double(), dim=1).gather(1, outputs.wanted[own, None])[:, 0].numpy()
    seen = np.array([_sampled(protocol, outputs, models, own) for _ in range(queries)])
    return float(((seen == outputs.wanted[own].numpy()) - public).sum())


def _sampled(protocol: Protocol, outputs: ModelOutput, models: Sequence[int], block: slice) -> NDArray[np.int64]:
    return np.array(sample(release(protocol, outputs, models, block).weights))


def guess_parts(protocol: Protocol, queries: int, guesses: int) -> Guessed:
    """Plants every part by a fair coin, and guesses the coins from the tokens of the part's own queries.

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
    return Guessed(len(coins), guesses, correct_guesses(coins, np.array(scores), guesses))


def findings(
    protocol: Protocol, guessed: Guessed, tokens: int, delta: float, confidence: float, subject: str
) -> list[Finding]:
    """What the guesses prove against the protocol's claim for all the tokens that were released."""
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

    found = [
        finding(
            ATTACK,
            "(epsilon, delta)",
            lambda level: one_run_epsilon(guessed.planted, guessed.guesses, guessed.correct, delta, level),
        )
    ]
    if protocol.event.pld() is not None:
        found.append(
            finding(F_ATTACK, "trade-off curve", lambda level: f_epsilon(protocol.event, guessed, tokens, delta, level))
        )
    return found


def f_epsilon(event: Event, guessed: Guessed, tokens: int, delta: float, confidence: float) -> float:
    """Lower bound on epsilon, for a mechanism whose trade-off curve is that of some number of tokens of the event.

    Returns:
        epsilon at ``delta`` of the most tokens whose curve the guesses rule out at ``confidence``; 0 where they rule
        out none.
    """

    def ruled_out(count: int) -> bool:
        curve = TradeOff.of_pld(_composed(event, count))
        return f_one_run_p_value(curve, guessed.planted, guessed.guesses, guessed.correct) <= 1 - confidence

    if not ruled_out(1):
        return 0.0
    low, high = 1, _MOST_TIMES * tokens
    while high - low > max(1, low // 50):
        middle = max(low + 1, round((low * high) ** 0.5))
        low, high = (middle, high) if ruled_out(middle) else (low, middle)
    return float(_composed(event, low).get_epsilon_for_delta(delta))


@lru_cache(maxsize=64)
def _composed(event: Event, tokens: int) -> PrivacyLossDistribution:
    """By dp-accounting alone: the accountant is among what is attacked."""
    pld = event.pld(_INTERVAL)
    assert pld is not None  # `findings` asks for none of other events
    return pld.self_compose(tokens)
