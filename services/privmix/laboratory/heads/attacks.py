"""Attacks heads: measures what a release reveals about one row and compares it with the training's epsilon.

- `neighbours` trains many times on each of two tables that differ in one row, releases one parameter vector each time,
  and bounds epsilon from below by the best test on the releases (Clopper & Pearson).
- `one_run` includes each row by a fair coin, and trains once (Steinke, Nasr, Jagielski 2023).
- `membership` runs LiRA (Carlini et al. 2022) with shadows of random halves of the rows.
"""

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm, probplot
from torch import Tensor

from privmix.laboratory.audit import bounds
from privmix.laboratory.audit.finding import CERTAIN, Finding
from privmix.laboratory.heads import MethodName, methods
from privmix.laboratory.heads.certified import CertifiedSettings, total_losses
from privmix.laboratory.heads.expm_nf import ExpMNFSettings, FitSettings, expm_energy, fit, release
from privmix.laboratory.heads.flows import Flow, FlowSettings
from privmix.laboratory.heads.methods import METHODS
from privmix.laboratory.heads.models import predictions
from privmix.laboratory.heads.table import Table
from privmix.privacy.arrays import Reals
from privmix.privacy.sampling.selection import SelectionEvent, select

# Returns `count` independent releases of a table, float64 [count, D].
Releases = Callable[[Table, int], Reals]

_FLOWS_AT_ONCE = 250
_CHOSEN_AT = 0.95
# The minimum standard deviation of the scores of LiRA, for rows whose scores do not vary.
_LEAST_DEVIATION = 1e-6

NARROW = ExpMNFSettings(
    flow=FlowSettings(layers=1, sigma=1e-3), fit=FitSettings(samples=16, steps=200, learning_rate=0.003)
)
"""A flow with a narrow base."""

CONFIDENCE = 0.95
"""The confidence of a finding's lower bound."""

FALSE_POSITIVES = [0.003, 0.01, 0.03, 0.1, 0.3]
"""The false-positive rates at which the curves of LiRA are recorded."""


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
    for pair in (lever(), lever(height=1.0)):
        yield neighbours("expm-nf", published_releases(epsilon, NARROW), pair, epsilon, trials=trials)
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
    lower, certain = bounds.held_out_epsilons(first[:, best], second[:, best], 0.0, (CONFIDENCE, CERTAIN))
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
    found = [
        bounds.epsilon_of(bounds.best_test(a, b, 0.0, _CHOSEN_AT), a, b, 0.0, _CHOSEN_AT)
        for a, b in zip(first.T, second.T, strict=True)
    ]
    return int(np.argmax(found))


def one_run(name: MethodName, table: Table, epsilon: float, runs: int = 50) -> Finding:
    """Includes each row by a fair coin, trains, and guesses all coins by how far the loss of their rows fell.

    As the paper reports it, the bound is the 95th percentile of several runs, each with a bound of its own.
    """
    rows, delta, found = len(table.x), METHODS[name].delta, []
    for seed in (secrets.randbelow(2**31) for _ in range(runs)):
        coins = np.array([secrets.choice((True, False)) for _ in range(rows)])
        trained = METHODS[name].release(table.rows(coins), epsilon, seed)[0]
        thetas = methods.built(table, seed).vector, trained
        before, after = (np.logaddexp(0, -_scores(theta, table)) for theta in thetas)
        correct = bounds.correct_guesses(coins, before - after, rows)
        found.append([bounds.one_run_epsilon(rows, rows, correct, delta, level) for level in (CONFIDENCE, CERTAIN)])
    lower, certain = np.quantile(found, 0.95, axis=0, method="lower").tolist()
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
        details={"planted": rows, "runs": runs},
    )


def membership(
    names: Sequence[MethodName], table: Table, epsilon: float, *, shadows: int = 1000, attacked: int = 50
) -> dict[MethodName, dict[str, Any]]:
    """Runs LiRA as the paper does: shadows are trained without privacy, and attack several models of each method.

    Returns:
        JSON data: the median area under the curve; the true-positive rates at `FALSE_POSITIVES`, of the models' 5 %,
        50 % and 95 % quantiles; and the median correlation of a row's scores with normal quantiles, over shadows.
    """
    of_shadows = _on_halves("non-private", table, 0.0, shadows, 0)
    normal = [probplot(own[~seen])[1][2] for own, seen in zip(*map(np.transpose, of_shadows), strict=True)]
    found: dict[MethodName, dict[str, Any]] = {}
    for name in names:
        scored, included = _on_halves(name, table, epsilon, attacked, shadows)
        ratios = likelihood_ratios(scored, *of_shadows)
        sides = [(own[seen], own[~seen]) for own, seen in zip(ratios, included, strict=True)]
        rates = [true_positives(*side) for side in sides]
        found[name] = {
            "area": float(np.median([bounds.area(*side) for side in sides])),
            "false_positives": FALSE_POSITIVES,
            "true_positives": np.quantile(rates, (0.05, 0.5, 0.95), axis=0).tolist(),
            "normality": float(np.median(normal)),
        }
    return found


def likelihood_ratios(scored: Reals, of_shadows: Reals, seen: NDArray[np.bool_]) -> Reals:
    """Returns the log-likelihood ratio of each row under each attacked model, float64 [M, n] (Carlini et al. 2022).

    Each row has two normal distributions of its own: of shadows that saw it, and of shadows that did not.

    Args:
        scored: the score of each row under each attacked model, [M, n].
        of_shadows, seen: likewise under each shadow, and whether the shadow saw the row, [S, n].
    """
    sides = [np.where(side, of_shadows, np.nan) for side in (seen, ~seen)]
    inside, outside = (
        norm.logpdf(scored, np.nanmean(own, axis=0), np.maximum(np.nanstd(own, axis=0), _LEAST_DEVIATION))
        for own in sides
    )
    return np.asarray(inside - outside)


def true_positives(inside: Reals, outside: Reals) -> list[float]:
    """Returns the largest true-positive rates at false-positive rates of at most `FALSE_POSITIVES`."""
    falling = np.sort(outside)[::-1]
    return [float((inside > falling[int(rate * len(outside))]).mean()) for rate in FALSE_POSITIVES]


def _on_halves(
    name: MethodName, table: Table, epsilon: float, count: int, first: int
) -> tuple[Reals, NDArray[np.bool_]]:
    """Trains on random halves of the rows; returns all rows' scores, and which of them a model saw, [count, n].

    Args:
        first: the seed of the first model.
    """
    included = np.random.default_rng(first).random((count, len(table.x))) < 0.5
    trained = (METHODS[name].release(table.rows(half), epsilon, first + k)[0] for k, half in enumerate(included))
    return np.stack([_scores(theta, table) for theta in trained]), included


@torch.no_grad()
def _scores(theta: Tensor, table: Table) -> Reals:
    """Returns the logit of the confidence in each row's own target, float64 [n] (Carlini et al. 2022, equation 6)."""
    outputs = predictions(methods.built(table), theta[None], table.x)[0]
    confidence = np.clip(np.where(table.y == 1, outputs, 1 - outputs), 1e-9, 1 - 1e-9)
    return np.asarray(np.log(confidence) - np.log1p(-confidence))
