"""Auditing with one run: many users, each included by a fair coin, and one attacker who guesses the coins.

Steinke, Nasr, Jagielski 2023. One ensemble is enough, because every coin is a trial of its own; what differential
privacy says of all guesses together bounds epsilon from below (`bounds.one_run_epsilon`).
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from services.audit.attacks import likelihood
from services.audit.report.bounds import one_run_epsilon
from services.audit.report.finding import CERTAIN, Finding
from services.audit.worlds import distributions
from services.audit.worlds.chances import release
from services.audit.worlds.models import ModelOutput
from services.audit.worlds.testbed import Testbed
from services.privacy.protocol import Protocol
from services.privacy.sampling.categorical import sample
from services.privacy.worlds import Pair, Reals, World

ATTACK = "one-run audit"
_ORDER = 2.0


def of_parts(
    protocol: Protocol, *, queries: int, delta: float, confidence: float, guesses: int, subject: str | None = None
) -> Finding:
    """Every part is planted, in the worst case, in ``queries`` queries of its own; its coin chooses one of two models.

    Raises:
        NoPairError: no worst case is known for this protocol.
    """
    pair = distributions.worst_pair(protocol, protocol.event, _ORDER)
    coins = [secrets.choice((True, False)) for _ in range(protocol.parts)]
    ratio = distributions.log_ratio(*distributions.pair_laws(protocol, pair))
    scores = np.array(
        [
            ratio[distributions.tokens(protocol, _attacked(pair, part, coin), queries)].sum()
            for part, coin in enumerate(coins)
        ]
    )
    tokens = queries * protocol.parts
    return _finding(protocol, coins, scores, tokens, delta, confidence, guesses, subject or protocol.name)


def of_users(
    protocol: Protocol,
    testbed: Testbed,
    *,
    queries: int,
    delta: float,
    confidence: float,
    guesses: int,
    subject: str | None = None,
) -> Finding:
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
    subject = subject or protocol.name
    return _finding(protocol, coins, np.array(scores), tokens, delta, confidence, guesses, subject)


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


def _finding(
    protocol: Protocol,
    coins: Sequence[bool],
    scores: Reals,
    tokens: int,
    delta: float,
    confidence: float,
    guesses: int,
    subject: str,
) -> Finding:
    correct = correct_guesses(coins, scores, guesses)
    lower, certain = (one_run_epsilon(len(coins), guesses, correct, delta, each) for each in (confidence, CERTAIN))
    return Finding(
        attack=ATTACK,
        subject=subject,
        status=protocol.guarantee.status,
        claims=likelihood.claims_of(protocol.event, tokens, delta),
        delta=delta,
        lower=lower,
        confidence=confidence,
        certain=certain,
        details={
            "adjacency": protocol.event.adjacency,
            "tokens": tokens,
            "planted": len(coins),
            "guesses": guesses,
            "correct": correct,
            "parts": protocol.parts,
        },
    )
