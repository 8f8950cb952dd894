"""Checks accounts: what every token tells of a part must be charged to the part's account.

Claims of accounts are about charges, which no client sees, so that tokens alone refute them slowly. This reads the
charges: it compares them with the exact divergences of the releases, without statistics.
"""

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import torch
from scipy.special import log_softmax
from torch import Tensor

from privmix.laboratory.audit.distributions import renyi_divergence
from privmix.privacy.accounting.tilts import moment_factor
from privmix.privacy.arrays import Reals
from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocol import Answers
from privmix.privacy.protocols.individual import WHOLE, Individual

PARTS = 64
"""The number of parts of the audited releases. With many parts the bound of a token is tight."""

_ORDERS = (1.5, 2.0, 4.0, 16.0)
_RANDOM, _VOCABULARY, _SPREAD, _SEED = 8, 12, 2.0, 0
# The rare tokens of a revealing world, and by how much the part moves their probabilities.
_RARE, _STEPS = 0.02, (0.05, 0.2, 0.8)
# A smaller divergence is the rounding of the distributions to float64.
_LEAST = 1e-14
# A token's divergence and its bound are computed in float64.
_ROUNDING = 1e-6


@dataclasses.dataclass(frozen=True)
class _Case:
    """Two worlds that differ in the last part's row: public [V] and rows [parts, V], log-probabilities."""

    public: Reals
    before: Reals
    after: Reals


def account_faults(protocol: Individual) -> tuple[str, ...]:
    """Compares charges with what the releases tell; returns what differs."""
    tight = dataclasses.replace(protocol, parts=max(protocol.parts, PARTS))
    cases = [*_revealing(tight), *_random(tight)]
    told = float(max(_told(tight, case, *spent) for case in cases for spent in _SPENT))
    refuted = []
    if told > 1 + _ROUNDING:
        refuted.append(f"a token tells {told:.3g} times as much of a part as the part's account is charged")
    if any(_speaks_when_spent(tight, case) for case in cases):
        refuted.append("a part whose account is empty changes a token")
    if any(_looks_at_others(tight, case) for case in cases):
        refuted.append("what a part says or pays depends on another part")
    return tuple(refuted)


_SPENT = ((False, False), (True, False), (False, True))


def _revealing(protocol: Individual) -> Iterator[_Case]:
    """Yields worlds in which the part moves two rare tokens, which all others avoid: there the bound is attained."""
    public = np.array([_RARE, _RARE, 1 - 2 * _RARE])
    others = [np.log([1e-9, 1e-9, 1 - 2e-9])] * (protocol.parts - 1)
    for step in _STEPS:
        moved = np.array([step, -step, 0.0])
        worlds = [np.array([*others, np.log(public * (1 + sign * moved))]) for sign in (1, -1)]
        yield _Case(np.log(public), *worlds)


def _random(protocol: Individual) -> Iterator[_Case]:
    generator = np.random.default_rng(_SEED)
    for spread in np.geomspace(_SPREAD / 10, _SPREAD, _RANDOM):
        public = log_softmax(generator.normal(scale=_SPREAD, size=_VOCABULARY))
        rows = log_softmax(public + generator.normal(scale=spread, size=(protocol.parts + 1, _VOCABULARY)), axis=1)
        yield _Case(public, rows[:-1], np.concatenate([rows[:-2], rows[-1:]]))


def _answers(protocol: Individual, public: Reals, rows: Reals, own: int) -> Answers:
    """Returns the answers where the last part may charge `own` grains, and the others a whole account."""
    allowances = torch.full((1, protocol.parts), WHOLE, dtype=torch.int64)
    allowances[0, -1] = own
    shaped = shape(
        torch.tensor(public[None], dtype=torch.float32), torch.tensor(rows, dtype=torch.float32), [protocol.draw()]
    )
    return dataclasses.replace(shaped, allowances=allowances)


def _released(protocol: Individual, public: Reals, rows: Reals, own: int) -> tuple[Reals, Tensor]:
    """Returns the exact distribution of the token, float64 [V], and the charges, int64 [parts]."""
    release = protocol.distribution(_answers(protocol, public, rows, own))
    assert release.charges is not None
    weights = release.weights[0].numpy().astype(np.longdouble)
    return np.asarray(weights / weights.sum(), dtype=np.float64), release.charges[0]


def _told(protocol: Individual, case: _Case, spent_before: bool, spent_after: bool) -> float:
    """Returns the divergence between two worlds as a fraction of what both worlds charge; inf beyond an allowance."""
    allowance, norms = WHOLE // protocol.tokens, 0.0
    laws: list[Reals] = []
    for rows, spent in ((case.before, spent_before), (case.after, spent_after)):
        allowed = 0 if spent else allowance
        law, charges = _released(protocol, case.public, rows, allowed)
        if not 0 <= int(charges[-1]) <= allowed:
            return math.inf
        laws.append(law)
        norms += math.sqrt(int(charges[-1]) / WHOLE * protocol.size)
    bounds = moment_factor(_ORDERS, protocol.ratio) * norms**2
    p, q = laws
    told = [max(renyi_divergence(p, q, order), renyi_divergence(q, p, order)) for order in _ORDERS]
    fractions = [own / bound if bound else math.inf for own, bound in zip(told, bounds, strict=True) if own > _LEAST]
    return max(fractions, default=0.0)


def _speaks_when_spent(protocol: Individual, case: _Case) -> bool:
    (first, charged), (second, _) = (_released(protocol, case.public, rows, 0) for rows in (case.before, case.after))
    return bool(charged[-1]) or not np.array_equal(first, second)


def _looks_at_others(protocol: Individual, case: _Case) -> bool:
    """Returns whether the last part's tilt or charge changes with the others' rows or allowances.

    The calls have the same shapes, because other shapes round differently.
    """
    paid, tilts = set(), []
    rows = case.before
    for others in (rows[:-1], np.roll(rows[:-1], 1, axis=1)):
        for allowed in (WHOLE, 0):
            whole = _answers(protocol, case.public, np.concatenate([others, rows[-1:]]), WHOLE // protocol.tokens)
            assert whole.allowances is not None
            whole.allowances[0, :-1] = allowed
            sums, charges = protocol.tilts(whole.ratios[None], whole.public, whole.allowances)
            paid.add(int(charges[0, -1]))
            tilts += [] if allowed else [sums]  # the others are silent
    return len(paid) > 1 or not torch.equal(*tilts)
