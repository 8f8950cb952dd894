"""Computes the numbers of the papers that need no corpus, each by the code that serves, trains or attacks."""

from functools import lru_cache

import numpy as np

from privmix.laboratory.audit import published as audit
from privmix.laboratory.audit.distributions import tokens_epsilon
from privmix.privacy import accounting
from privmix.privacy.accounting import published
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.protocols.adapmixed import screening_rdp
from privmix.privacy.protocols.pmixed import PMixedSettings
from privmix.privacy.protocols.submix import partition_to_user, random_stopping
from privmix.privacy.protocols.subsample_aggregate import SubsampleAggregateEvent

DELTA = 1e-5
"""The delta of all five papers."""


def default(protocol: str, field: str) -> float:
    """The default of a protocol's field."""
    return float(PROTOCOLS[protocol].model_fields[field].default)


def converted(order: float, loss: float, delta: float = DELTA) -> float:
    """The epsilon of a Rényi loss at an order."""
    return accounting.epsilon(np.array([loss]), delta, [order]).epsilon


def conversion(order: float) -> float:
    """What the conversion to epsilon adds to a loss that is not close to 0."""
    return 100 - published.total_loss(order, 100, DELTA)


def pmixed_epsilon(parts: int, q: float, drawn: int, order: int, epsilon: float, tokens: int) -> float:
    """The epsilon of all tokens with the beta that Algorithm 1 takes, if each of them drew so many parts."""
    settings = _pmixed(parts, q, order, epsilon, tokens)
    beta = settings.details(settings.plan(parts))["beta"][str(drawn)]
    return fixed_beta_epsilon(q, drawn, order, beta, tokens)


def fixed_beta_epsilon(q: float, drawn: int, order: int, beta: float, tokens: int) -> float:
    """The epsilon of all tokens with a given beta."""
    return converted(order, tokens * published.subsampled_loss(order, q, drawn, beta))


def pmixed_worst(parts: int, q: float, order: int, epsilon: float, tokens: int) -> float:
    """The exact epsilon of the worst known pair."""
    return audit.against(_pmixed(parts, q, order, epsilon, tokens).plan(parts), tokens, DELTA).epsilon


def screening(parts: int, order: float, sigma: float, mix: float, tokens: int) -> float:
    """The Rényi loss of the screening of all queries."""
    return tokens * float(screening_rdp(parts, sigma, mix, [order])[0])


def adapmixed(parts: int, tokens: int, text: str, field: str) -> float:
    """What is stated of the text with or without a part, or the exact epsilon of the two."""
    with_part, without = _adapmixed(parts, tokens)
    return float(getattr(with_part if text == "with" else without, field))


def submix(parts: int, tokens: int, seen: str) -> float:
    """The exact epsilon of the worst known pair: of the charged answers, or of all that is seen."""
    answers, all_seen = audit.of_submix(parts, DELTA, tokens)
    return (answers if seen == "answers" else all_seen).worst


def stopping(loss: float, tokens: int) -> float:
    """The Rényi loss for an observer who also sees the length of the output."""
    return random_stopping(loss, tokens)


def user_loss(order: float, loss: float) -> float:
    """The Rényi loss at half the order for a user."""
    return partition_to_user(order, loss)[1]


def laplace(scale: float) -> float:
    """The epsilon, at delta 0, of a count with Laplace noise: an increase alone, as half of one moved."""
    return float(SubsampleAggregateEvent(1, scale).rdp(np.array([1e6]))[0]) / 2


def deterministic() -> float:
    """The epsilon of a released number that differs for sure between neighbours."""
    return tokens_epsilon(np.array([1.0, 0.0]), np.array([0.0, 1.0]), 1, DELTA)


def composed(epsilon: float, times: int) -> float:
    """The epsilon of several mechanisms, by the composition of their losses, at a delta of nearly 0."""
    composed = accounting.pld_epsilon({SubsampleAggregateEvent(1, 2 / epsilon): times}, 1e-15)
    assert composed is not None
    return composed


def flow_parameters(dimension: int, layers: int) -> float:
    """The number of a flow's parameters over models with so many."""
    from privmix.laboratory.heads.flows import Planar

    return float(sum(each.numel() for each in Planar(dimension, layers).parameters()))


def sensitivity(values: int) -> float:
    """The largest change of the summed l2 loss when one row is replaced, over a grid of rows and models."""
    import torch

    from privmix.laboratory.heads.models import LogisticRegression, Parametrised, squared_loss

    grid = torch.linspace(-10, 10, values)
    model, thetas = Parametrised(LogisticRegression(1)), torch.cartesian_prod(grid, grid)
    losses = [squared_loss(model.outputs(thetas, grid[:, None]), torch.tensor(target)) for target in (0.0, 1.0)]
    each = torch.cat(losses, dim=1)
    return float((each.amax(dim=1) - each.amin(dim=1)).max())


def kept(method: str, epsilon: float, seeds: int = 1) -> float:
    """The fraction of the area under the curve without privacy that a method keeps, on RAND."""
    from privmix.foundation.progress import Display
    from privmix.laboratory.heads.compare import compare
    from privmix.laboratory.heads.data import DATASETS

    cells = compare(DATASETS["rand"](), Display(), [epsilon], ("non-private", method), seeds)["cells"]  # type: ignore[arg-type]
    return float(cells[-1]["kept"])


def one_run(method: str, epsilon: float) -> float:
    """The lower bound of epsilon, at confidence 95 %, by one training with planted rows."""
    from privmix.laboratory.heads.attacks import one_run as attack
    from privmix.laboratory.heads.data import breast_cancer

    return attack(method, breast_cancer(), epsilon).lower  # type: ignore[arg-type]


@lru_cache(maxsize=1)
def _adapmixed(parts: int, tokens: int) -> tuple[audit.Claim, ...]:
    return tuple(audit.of_adapmixed(parts, DELTA, tokens))


def _pmixed(parts: int, q: float, order: int, epsilon: float, tokens: int) -> PMixedSettings:
    return PMixedSettings(mollifier="renyi", q=q, order=order, epsilon=epsilon, delta=DELTA, tokens=tokens)
