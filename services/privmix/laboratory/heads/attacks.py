"""Attacks heads: measures what a release reveals about one row and compares it with the training's epsilon.

- `neighbours` trains many times on each of two tables that differ in one row, releases one parameter vector each time,
  and bounds epsilon from below by the best test on the releases (Clopper & Pearson).
- `one_run` plants many rows, includes each by a fair coin, and trains once (Steinke, Nasr, Jagielski 2023).
- `membership` runs LiRA (Carlini et al. 2022) with models of random halves of the rows.
"""

import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Tensor

from privmix.laboratory.audit.bounds import correct_guesses, one_run_epsilon
from privmix.laboratory.audit.finding import CERTAIN, Finding
from privmix.laboratory.audit.roc import Roc, best_test, epsilon_of, held_out_epsilons
from privmix.laboratory.heads import methods
from privmix.laboratory.heads.certified import CertifiedSettings, total_losses
from privmix.laboratory.heads.expm_nf import ExpMNFSettings, FitSettings, expm_energy, fit, release
from privmix.laboratory.heads.flows import Flow, FlowSettings
from privmix.laboratory.heads.methods import METHODS
from privmix.laboratory.heads.models import predictions
from privmix.laboratory.heads.names import MethodName
from privmix.laboratory.heads.table import Table
from privmix.privacy.arrays import Reals
from privmix.privacy.sampling.selection import SelectionEvent, select

# Returns `count` independent releases of a table, float64 [count, D].
Releases = Callable[[Table, int], Reals]

_FLOWS_AT_ONCE = 250
_CHOSEN_AT = 0.95
# The minimum standard deviation of the scores of LiRA, for samples too small to estimate it.
_LEAST_DEVIATION = 1e-6

CONFIDENCE = 0.95
"""The confidence of a finding's lower bound."""


def lever(rows: int = 40, height: float = 1000.0) -> tuple[Table, Table]:
    """Returns two tables that differ in the target of one row, the only row with a value in the last feature.

    A model learns that feature from this row alone. An optimiser that rescales gradients, such as RMSProp, follows the
    row's gradient even if a small epsilon makes it tiny.
    """
    rng = np.random.default_rng(0)
    x = rng.uniform(-1, 1, size=(rows, 2)).astype(np.float32)
    y = (x[:, 0] + 0.5 * rng.normal(size=rows) > 0).astype(np.float32)
    x[:, -1] = 0.0
    x[-1] = 0.0
    x[-1, -1] = height
    y[-1] = 1.0
    changed = y.copy()
    changed[-1] = 0.0
    table = Table("lever", x, y, np.arange(rows), population=rows)
    return table, replace(table, y=changed)


def published_releases(epsilon: float, settings: ExpMNFSettings) -> Releases:
    """Returns a function that fits a new flow for each release. It fits many independent flows in one batch."""

    def releases(table: Table, count: int) -> Reals:
        x, y = torch.from_numpy(table.x), torch.from_numpy(table.y)
        model = methods.built(table)
        energy = expm_energy(model, x, y, epsilon, settings.regulariser)
        thetas: list[Tensor] = []
        while len(thetas) < count:
            flows = [Flow(model.dimension, settings.flow) for _ in range(min(_FLOWS_AT_ONCE, count - len(thetas)))]
            fit(flows, energy, settings.fit)
            thetas += [release(flow)[0] for flow in flows]
        return np.asarray(torch.stack(thetas).double().numpy())

    return releases


def certified_releases(epsilon: float, settings: CertifiedSettings) -> Releases:
    """Returns a function that runs one round of the certified variant, with all of epsilon and fixed candidates."""
    event = SelectionEvent(epsilon)

    def releases(table: Table, count: int) -> Reals:
        model = methods.built(table)
        generator = torch.Generator().manual_seed(0)
        thetas = settings.sigma * torch.randn(settings.candidates, model.dimension, generator=generator)
        losses = total_losses(model, thetas, table)
        return thetas.double().numpy()[[select(losses, event) for _ in range(count)]]

    return releases


def of_neighbours(epsilon: float, trials: int) -> Iterator[Finding]:
    """Attacks a flow with a narrow base, and the certified variant, with a long and with an ordinary lever."""
    narrow = ExpMNFSettings(
        flow=FlowSettings(layers=1, sigma=1e-3), fit=FitSettings(samples=16, steps=200, learning_rate=0.003)
    )
    for pair in (lever(), lever(height=1.0)):
        yield neighbours("expm-nf", published_releases(epsilon, narrow), pair, epsilon, trials=trials)
        certified = certified_releases(epsilon, CertifiedSettings())
        yield neighbours("expm-certified", certified, pair, epsilon, trials=20 * trials)


def neighbours(
    name: MethodName,
    releases: Releases,
    pair: tuple[Table, Table],
    epsilon: float,
    *,
    trials: int = 500,
) -> Finding:
    """Bounds epsilon from below by distinguishing the releases of two neighbouring tables.

    The score of a release is one of its coordinates. Half of the releases determine the coordinate and the threshold;
    the other half bounds epsilon.
    """
    first, second = (releases(table, trials) for table in pair)
    best = _best_coordinate(first[: trials // 2], second[: trials // 2])
    # `held_out_epsilons` chooses its test from the same first halves.
    lower, certain = held_out_epsilons(first[:, best], second[:, best], 0.0, (CONFIDENCE, CERTAIN))
    return Finding(
        attack="test on releases of neighbouring tables",
        subject=f"{METHODS[name].label}, {pair[0].name}",
        status=METHODS[name].status,
        adjacency="one row replaced",
        claim=epsilon,
        delta=0.0,
        lower=lower,
        confidence=CONFIDENCE,
        certain=certain,
        details={"trials": trials, "rows": len(pair[0].x)},
    )


def _best_coordinate(first: Reals, second: Reals) -> int:
    """Returns the coordinate whose best threshold gives the highest bound of epsilon on these releases."""
    bounds = [
        epsilon_of(best_test(a, b, 0.0, _CHOSEN_AT), a, b, 0.0, _CHOSEN_AT)
        for a, b in zip(first.T, second.T, strict=True)
    ]
    return int(np.argmax(bounds))


def one_run(name: MethodName, table: Table, epsilon: float, *, planted: int = 200, guesses: int = 50) -> Finding:
    """Plants rows with random targets, includes each by a fair coin, trains once, and guesses the coins from losses."""
    planted = min(planted, len(table.x) // 2)
    rng = np.random.default_rng()
    chosen = rng.choice(len(table.x), size=planted, replace=False)
    targets = table.y.copy()
    targets[chosen] = rng.integers(0, 2, size=planted)
    whole = replace(table, y=targets)
    coins = [secrets.choice((True, False)) for _ in range(planted)]
    kept = np.ones(len(table.x), dtype=np.bool_)
    kept[chosen[~np.array(coins)]] = False
    theta = METHODS[name].release(whole.rows(kept), epsilon, secrets.randbelow(2**31))[0]
    scores = _scores(theta, whole.rows(chosen))
    correct = correct_guesses(coins, scores, guesses)
    delta = METHODS[name].delta
    lower, certain = (one_run_epsilon(planted, guesses, correct, delta, level) for level in (CONFIDENCE, CERTAIN))
    return Finding(
        attack="one-run audit",
        subject=f"{METHODS[name].label}, {table.name}",
        status=METHODS[name].status,
        adjacency="one row present or absent",
        claim=epsilon if METHODS[name].private else math.inf,
        delta=delta,
        lower=lower,
        confidence=CONFIDENCE,
        certain=certain,
        details={"planted": planted, "guesses": guesses, "correct": correct},
    )


def membership(name: MethodName, table: Table, epsilon: float, *, targets: int = 50, shadows: int = 32) -> Roc:
    """Runs LiRA: trains models on random halves of the rows and attacks each model with the scores of the others."""
    rng = np.random.default_rng(0)
    chosen = rng.choice(len(table.x), size=targets, replace=False)
    included = np.empty((shadows, targets), dtype=np.bool_)
    scored = np.empty((shadows, targets))
    for shadow in range(shadows):
        half = rng.random(len(table.x)) < 0.5
        included[shadow] = half[chosen]
        theta = METHODS[name].release(table.rows(half), epsilon, shadow)[0]
        scored[shadow] = _scores(theta, table.rows(chosen))
    return Roc.of(*lira(scored, included))


def lira(scored: Reals, included: NDArray[np.bool_]) -> tuple[Reals, Reals]:
    """Attacks each model in turn (Carlini et al. 2022); returns log-likelihood ratios of members and of non-members.

    The other models give two normal distributions of a target's score: one of models with the target, one of models
    without. Targets share one variance, which is better with few shadows (section VI).

    Args:
        scored, included: the score of each target under each model, and whether the model saw it, [models, targets].
    """
    ratios = np.full(scored.shape, np.nan)
    for target in range(len(scored)):
        rest = np.arange(len(scored)) != target
        inside, outside = (np.where(included[rest] == side, scored[rest], np.nan) for side in (True, False))
        known = (~np.isnan(inside)).any(axis=0) & (~np.isnan(outside)).any(axis=0)
        means = [np.nanmean(side[:, known], axis=0) for side in (inside, outside)]
        residuals = [side[:, known] - mean for side, mean in zip((inside, outside), means, strict=True)]
        deviations = [max(float(np.nanstd(residual)), _LEAST_DEVIATION) for residual in residuals]
        own = scored[target, known]
        ratios[target, known] = norm.logpdf(own, means[0], deviations[0]) - norm.logpdf(own, means[1], deviations[1])
    valid = ~np.isnan(ratios)
    return ratios[valid & included], ratios[valid & ~included]


def summary(roc: Roc) -> Mapping[str, Any]:
    """Returns the area under the curve and the true-positive rate at 1 % false positives."""
    return {"area": roc.area, "true_positives_at_1_percent": roc.true_positives_at(0.01), "roc": roc.record()}


@torch.no_grad()
def _scores(theta: Tensor, table: Table) -> Reals:
    """Returns the logit of the confidence in each row's own target, float64 [n] (Carlini et al. 2022, equation 6)."""
    outputs = predictions(methods.built(table), theta[None], table.x)[0]
    confidence = np.clip(np.where(table.y == 1, outputs, 1 - outputs), 1e-9, 1 - 1e-9)
    return np.asarray(np.log(confidence) - np.log1p(-confidence))
