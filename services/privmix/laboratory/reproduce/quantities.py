"""Computes the numbers of the papers that need no corpus, each by the code that serves, trains or attacks."""

from functools import lru_cache
from typing import Any

import numpy as np

from privmix.laboratory.audit import published as audit
from privmix.laboratory.audit.distributions import tokens_epsilon
from privmix.privacy import accounting
from privmix.privacy.accounting import published
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.protocols.adapmixed import screening_rdp
from privmix.privacy.protocols.pmixed import PMixedSettings
from privmix.privacy.protocols.submix import SubMixSettings, partition_to_user, random_stopping
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
    return audit.against(_pmixed(parts, q, order, epsilon, tokens).plan(parts), tokens, DELTA)


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


def stopping_answers(factor: float, tokens: int) -> float:
    """The chance that random stopping lets all queries be answered: the number of answers is below what it draws."""
    drawn = SubMixSettings(random_stopping=factor, tokens=tokens).stop_within
    assert drawn is not None
    return 1 - tokens / drawn


def group_loss(loss: float, doublings: int) -> float:
    """The Rényi loss for 2^c users, at 1/2^c of the order (Mironov 2017, Proposition 2)."""
    return loss * 3.0**doublings


def told(order: float, loss: float, codes: int) -> float:
    """The largest chance that an attacker names the right one of `codes` codes (Mironov 2017, Proposition 3)."""
    return float((np.exp(loss) / codes) ** ((order - 1) / order))


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


def d_dp(of: str, epsilon: float, height: float = 1.0) -> float:
    """The largest |log p/q| over models of two parameters, whose densities differ in one row's target.

    Args:
        of: "mechanism", on a grid, or "flow", at draws of one of two flows that are fitted by the same random numbers.
        height: the row's feature, which is 0 in all others.
    """
    import torch

    from privmix.laboratory.heads import expm_nf
    from privmix.laboratory.heads.attacks import NARROW, lever
    from privmix.laboratory.heads.flows import Flow
    from privmix.laboratory.heads.models import LogisticRegression, Parametrised

    model, logs, drawn = Parametrised(LogisticRegression(1)), [], None
    for table in lever(height=height):
        x, y = torch.from_numpy(table.x[:, 1:]).double(), torch.from_numpy(table.y).double()
        energy = expm_nf.expm_energy(model, x, y, epsilon, NARROW.regulariser)
        if of == "mechanism":
            grid = torch.linspace(-5, 5, 201, dtype=torch.float64)
            logs.append((-energy(torch.cartesian_prod(grid, grid))).log_softmax(0))
            continue
        torch.manual_seed(0)
        flow = Flow(2, NARROW.flow).double()
        expm_nf.fit([flow], energy, NARROW.fit)
        drawn = expm_nf.release(flow, 10_000, seed=0) if drawn is None else drawn
        logs.append(flow.log_density(drawn))
    return float((logs[0] - logs[1]).abs().max())


def posterior(of: str, epsilon: float) -> float:
    """The area under the curve on breast cancer's test rows, by the samples of one flow.

    Args:
        of: one "sample", the median; the one of the largest density, "map"; ten that "vote"; or "bayesian", the mean
            of each sample's probability of the target, by the tempered likelihood. Or "region", the largest width of
            the central 95 % of a parameter.
    """
    from privmix.laboratory.heads.models import auc

    outputs, energies, thetas, y = _samples(epsilon)
    if of == "region":
        return float(np.ptp(np.quantile(thetas, (0.025, 0.975), axis=0), axis=0).max())
    against, by = (np.exp(-epsilon / 2 * (outputs - target) ** 2) for target in (0, 1))
    scores = {
        "sample": outputs,
        "map": outputs[[energies.argmin()]],
        "votes": (outputs[:10] > 0.5).mean(axis=0, keepdims=True),
        "bayesian": (by / (by + against)).mean(axis=0, keepdims=True),
    }
    return float(np.median(auc(scores[of], y)))


@lru_cache(maxsize=4)
def _samples(epsilon: float) -> tuple[Any, ...]:
    """Returns the outputs of a flow's samples on the test rows, their energies, the samples, and the targets."""
    import torch

    from privmix.laboratory.heads import expm_nf, methods
    from privmix.laboratory.heads.data import breast_cancer
    from privmix.laboratory.heads.models import predictions
    from privmix.laboratory.heads.table import split

    parts = split(breast_cancer())
    model, thetas = methods.built(parts.train), methods.METHODS["expm-nf"].release(parts.train, epsilon, 0)
    x, y = torch.from_numpy(parts.train.x), torch.from_numpy(parts.train.y)
    energies = expm_nf.expm_energy(model, x, y, epsilon, methods.EXPM_NF.regulariser)(thetas)
    return predictions(model, thetas, parts.test.x), energies.numpy(), thetas.numpy(), parts.test.y


@lru_cache(maxsize=1)
def _adapmixed(parts: int, tokens: int) -> tuple[audit.Claim, ...]:
    return tuple(audit.of_adapmixed(parts, DELTA, tokens))


def _pmixed(parts: int, q: float, order: int, epsilon: float, tokens: int) -> PMixedSettings:
    return PMixedSettings(mollifier="renyi", q=q, order=order, epsilon=epsilon, delta=DELTA, tokens=tokens)
