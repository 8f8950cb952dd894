"""Attacks mechanisms with their own draws, releases and sampling, in the worst known case of each.

- `of_tokens`: the exact epsilon of the worst known pair, and counts of tokens against their exact distribution, which
  detect a wrong draw or re-used noise.
- `of_draws`: counts of drawn parts against the protocol's description.
- `of_releases`: integer weights against the published formula, without statistics.

An attack with counts or tokens refutes a sound mechanism once in a million times.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_softmax
from scipy.stats import binomtest
from torch import Tensor

from privmix.laboratory.audit.distributions import answers, draws, tokens_epsilon
from privmix.laboratory.audit.finding import CERTAIN
from privmix.laboratory.audit.worlds import World
from privmix.privacy.accounting import planning
from privmix.privacy.arrays import Reals
from privmix.privacy.events import Accountant, Event
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.sampling.categorical import sample
from tests.support.formulas import formula, formula_error
from tests.support.worst_cases import pair_laws, release_law, token_law, worst_pair, worst_pairs

DELTA = 1e-5
_VARIANTS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "pmixed": ({"projection": "mix"}, {"q": 0.25}),
    "adapmixed": ({"projection": "mix"},),
    "exponential": ({"sample": 2},),
}
_EFFORTS = {"adapmixed": 32, "gnmax": 4, "subsample-aggregate": 4}
_BATCH = 4096


def variants(name: str) -> tuple[Mapping[str, Any], ...]:
    """Returns the parameters under which a protocol is a different mechanism; the first are the default ones."""
    return ({}, *_VARIANTS.get(name, ()))


@cache
def audited(parts: int) -> tuple[tuple[str, Mapping[str, Any]], ...]:
    """Returns each protocol and variant that certifies the cost of a token of ``parts`` parts, with its parameters.

    Leaves out protocols that read no part, and those whose cost is that of a training, which no token shows.
    """
    by_order = Accountant(4.0)  # without exact composition, which takes a second and changes no guarantee
    planned = [
        (name, parameters, settings.model_validate(parameters).plan(parts, by_order))
        for name, settings in PROTOCOLS.items()
        if not settings.one_model
        for parameters in variants(name)
    ]
    return tuple(
        (name, parameters)
        for name, parameters, protocol in planned
        if protocol.guarantee.status == "certified" and protocol.rows != 0
    )


@dataclass(frozen=True)
class Attacked:
    """What an attack shows of an epsilon.

    Attributes:
        claim: the claimed epsilon.
        exact: that of the attacked pair, from its exact distributions.
        refuted: counts that contradict the description.
    """

    claim: float
    exact: float
    refuted: tuple[str, ...]

    @property
    def broken(self) -> bool:
        return bool(self.refuted) or self.exact > self.claim


def of_tokens(protocol: Protocol, tokens: int = 1, releases: int = 20_000, claimed: Event | None = None) -> Attacked:
    """Attacks the claim for a number of tokens, by default that of the protocol's own event.

    Args:
        releases: the number of tokens in each world; fewer where noise makes them slow.
    """
    event = claimed or protocol.event
    pair = worst_pair(protocol, event, tokens, DELTA)
    count = max(2, releases // _EFFORTS.get(protocol.name, 1))
    counts = [
        each
        for world in (pair.before, pair.after)
        for each in _token_counts(described_law(protocol, world), sampled(protocol, world, count))
    ]
    exact = tokens_epsilon(*pair_laws(protocol, pair), tokens, DELTA)
    return Attacked(planning.cost(event, tokens, DELTA).epsilon, exact, _refuted(counts))


def of_draws(protocol: Protocol, count: int = 4_000) -> tuple[str, ...]:
    """Compares draws with their distribution: the number of parts, each part, and repeated sets."""
    models = protocol.models
    sizes = {size: chance for (size,), chance in protocol.draws((models,)).items()}
    part = sum(chance for (own, _), chance in protocol.draws((1, models - 1)).items() if own)
    repeated = sum(chance**2 / math.comb(models, size) for size, chance in sizes.items())
    drawn = [protocol.draw() for _ in range(count)]
    by_size = np.bincount([len(each) for each in drawn])
    by_model = np.bincount([model for each in drawn for model in each], minlength=models)
    same = sum(first == second for first, second in zip(drawn[::2], drawn[1::2], strict=False))
    return _refuted(
        [
            *(_Count(f"{size} parts", int(own), count, sizes.get(size, 0.0)) for size, own in enumerate(by_size)),
            *(_Count(f"model {model}", int(own), count, part) for model, own in enumerate(by_model)),
            _Count("the same draw twice", same, count // 2, repeated),
        ]
    )


def of_releases(protocol: Protocol) -> bool | None:
    """Tells whether releases differ from the formula in the known worst cases, or on random distributions.

    Returns:
        None if the protocol has no formula apart from its code.
    """
    generator = np.random.default_rng(0)
    worlds = [world for pair in worst_pairs(protocol.event, protocol) for world in (pair.before, pair.after)]
    for spread in np.geomspace(0.15, 3, 8):  # from close to the public model to far from it
        public = log_softmax(generator.normal(scale=1.5, size=24))
        rows = log_softmax(public + generator.normal(scale=spread, size=(protocol.models, 24)), axis=1)
        worlds.append(World(public, rows, tuple(range(protocol.models))))
    differences = [_largest_difference(protocol, world) for world in worlds]
    known = [difference for difference in differences if difference is not None]
    return None if len(known) < len(worlds) else max(known) > formula_error(protocol)


def _largest_difference(protocol: Protocol, world: World) -> float | None:
    drawn = {tuple(sorted(protocol.draw())) for _ in range(8)}
    keys = sorted({_kinds(world, parts) for parts in drawn})
    laws = release_law(protocol, answers(world, keys)).numpy()
    public, rows, largest = np.exp(world.public), np.exp(world.rows), 0.0
    for key, law in zip(keys, laws, strict=True):
        stated = formula(protocol, public, rows[list(key)])
        if stated is None:
            return None
        largest = max(largest, float(np.abs(law - stated).max()))
    return largest


def sampled(protocol: Protocol, world: World, count: int) -> NDArray[np.int64]:
    """Returns ``count`` tokens from the serving code's draws, releases and sampling.

    Without noise, a release depends only on the kinds of the drawn parts, and is computed once per combination.
    """
    keys = [_kinds(world, protocol.draw()) for _ in range(count)]
    if protocol.noisy:
        blocks = [keys[start : start + _BATCH] for start in range(0, count, _BATCH)]
        return np.array([token for block in blocks for token in sample(_weights(protocol, world, block))])
    distinct = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    released = _weights(protocol, world, list(distinct))
    return np.array(sample(released[[distinct[key] for key in keys]]))


def _kinds(world: World, draw: Sequence[int]) -> tuple[int, ...]:
    return tuple(kind for part in draw if (kind := world.parts[part]) is not None)


def _weights(protocol: Protocol, world: World, keys: Sequence[tuple[int, ...]]) -> Tensor:
    return protocol.distribution(answers(world, keys)).weights


def described_law(protocol: Protocol, world: World) -> Reals:
    """Returns the probability of each token by the protocol's published formula, without its code, float64 [V].

    Releases in integers differ from it by rounding (about 1e-4), less than the tokens of a test can detect.
    """
    public, rows = np.exp(world.public), np.exp(world.rows)
    keys, chances = draws(protocol, world)
    laws = [formula(protocol, public, rows[list(key)]) for key in keys]
    described = [law for law in laws if law is not None]
    if len(described) < len(keys):
        return token_law(protocol, world)
    return np.asarray(chances @ np.array(described) / chances.sum())


def _token_counts(law: Reals, tokens: NDArray[np.int64]) -> Iterator["_Count"]:
    """Counts each token, and equal tokens in consecutive trials, which re-used noise or draws would change."""
    chances = law / law.sum()
    for token, count in enumerate(np.bincount(tokens, minlength=len(law))):
        yield _Count(f"token {token}", int(count), len(tokens), float(chances[token]))
    pairs = len(tokens) // 2
    same = int((tokens[: 2 * pairs : 2] == tokens[1 : 2 * pairs : 2]).sum())
    yield _Count("the same token twice", same, pairs, float((chances**2).sum()))


@dataclass(frozen=True)
class _Count:
    """The number of occurrences of an outcome in independent trials, and its chance in each."""

    what: str
    count: int
    trials: int
    chance: float

    @property
    def p_value(self) -> float:
        return float(binomtest(self.count, self.trials, min(1.0, max(0.0, self.chance))).pvalue) if self.trials else 1.0


def _refuted(counts: Sequence[_Count]) -> tuple[str, ...]:
    """Names the counts that contradict their chances. The joint false-alarm rate is 1 - `CERTAIN`."""
    return tuple(count.what for count in counts if count.p_value < (1 - CERTAIN) / len(counts))
