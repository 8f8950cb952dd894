"""Checks, from the files alone, that a ledger charges the private base under an ensemble.

    faults(Path("ensemble"), "ledger.db", trained=[Path("base")])    # an empty tuple if all is well

It trusts neither the manifest nor the ledger's own sum. Whether a model was trained on private text follows from its
weights; what was spent is composed again by dp-accounting from the events alone.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from safetensors import safe_open

from privmix.budget import reader
from privmix.budget.filter import Filter
from privmix.budget.state import Balance
from privmix.privacy import accounting
from privmix.privacy.accounting import counting
from privmix.privacy.events import PLD_INTERVAL
from privmix.privacy.protocols.dp_sgd import DpSgdEvent
from privmix.training import public_model
from privmix.training.manifest import Manifest, PrivateBase, private_base
from privmix.training.private_base import is_trained, merged

PRECISION = 1e-6
"""The largest difference of an epsilon from dp-accounting's that rounding explains."""
# The intervals of a grid up to the epsilon of a base, and the smallest interval.
_GRID, _FINEST = 1000, 1e-6


def faults(ensemble: Path, ledger: str, trained: Sequence[Path] = ()) -> tuple[str, ...]:
    """Returns what is wrong with the private base under an ensemble and its charge, each in one sentence.

    Args:
        trained: known directories of `privmix train-base`. A base model that has the weights of one of them was
            trained on private text, whatever its description says.

    Raises:
        InputError: the ensemble or a directory cannot be read (includes `ManifestError` and `PublicModelError`).
        LedgerError: the ledger cannot be read.
    """
    manifest, balance = Manifest.load(ensemble), reader.read(ledger)
    model = public_model.resolve(manifest.base_model)
    return (*_passed_as_public(model, manifest, trained), *charge_faults(manifest, balance))


def _passed_as_public(model: Path, manifest: Manifest, trained: Sequence[Path]) -> Iterator[str]:
    described = private_base(model)
    if described != manifest.private_base:
        yield f"the manifest says that {model} was {_trained(manifest.private_base)}, and it was {_trained(described)}"
    beside = [model.parent] if is_trained(model.parent) else []
    for directory in dict.fromkeys(path.resolve() for path in (*trained, *beside)):
        known = merged(directory)
        wanted = private_base(known)
        if described != wanted and weights_digest(model) == weights_digest(known):
            yield f"{model} passes as {_trained(described)}, and has the weights that {directory} made of private text"


def charge_faults(manifest: Manifest, balance: Balance) -> Iterator[str]:
    """Yields what is wrong with the charge of an ensemble's base in a ledger's balance, each in one sentence."""
    if balance.terms.ensemble != manifest.ensemble:
        yield "the ledger is another ensemble's"
    base, charged = manifest.private_base, balance.terms.base_event
    if base is not None and charged is None:
        yield f"the ledger does not charge the base, which was {_trained(base)}"
    elif base is not None and charged != base.training.event:
        yield f"the ledger charges one base and the parts are on another, which was {_trained(base)}; both are released"
    elif base is None and charged is not None:
        yield "the ledger charges a base, and the manifest has none"
    if balance.terms.enforced == "bound" and base is not None:
        reference = _by_order if balance.terms.counter is None else _by_counter
        due, stated = reference(balance, base.training.event), _stated(balance)
        if abs(due - stated) > PRECISION:
            way = "at its order" if balance.terms.counter is None else "by its counter"
            yield f"the ledger states epsilon {stated:.6f}, and the two events cost {due:.6f} {way}"


def _stated(balance: Balance) -> float:
    return Filter(balance.terms).epsilon(balance.charged)


def _by_order(balance: Balance, base: DpSgdEvent) -> float:
    """Returns the epsilon of the ledger's tokens and the base by Rényi divergences at the ledger's order."""
    order, delta = balance.terms.order, balance.terms.delta
    tokens = accounting.rdp(dict(balance.charged), [order]).item() if balance.charged else 0.0
    if not tokens:
        return _alone(base, order, delta)
    return _converted(_divergence(base, order) + tokens, order, delta)


def _by_counter(balance: Balance, base: DpSgdEvent) -> float:
    """Returns the epsilon of the ledger's tokens and the base by privacy loss distributions.

    A counter states the cost of a few tokens more than it granted, of its own event, at what blocks leave of delta. It
    is never less than the cost of the granted tokens, each of its own event, at all of delta: that depends neither on
    the price of a block nor on the number that the ledger took for them.
    """
    terms, counter = balance.terms, balance.terms.counter
    assert counter is not None
    alone, tokens = _alone(base, terms.order, terms.delta), Filter(terms).stated_tokens(balance.charged)
    if not tokens:
        return alone
    costly = {event: count for event, count in balance.charged.items() if event.rdp([terms.order]).any()}
    composed = [
        (accounting.pld({counter.unit: tokens}), counting.room(terms.delta, tokens)),
        (accounting.pld(costly), terms.delta),
    ]
    before = _losses(base)
    return max(float(before.compose(losses).get_epsilon_for_delta(delta)) for losses, delta in composed)


def _alone(base: DpSgdEvent, order: float, delta: float) -> float:
    """Returns the epsilon of the base before any token: of one release, which is converted exactly if that is less."""
    rounded = float(_losses(base).get_epsilon_for_delta(delta))
    # The interval of a grid adds to an epsilon of a few hundred intervals.
    finer = float(_losses(base, max(rounded / _GRID, _FINEST)).get_epsilon_for_delta(delta))
    return min(rounded, finer, _converted(_divergence(base, order), order, delta))


def _converted(divergence: float, order: float, delta: float) -> float:
    return float(compute_epsilon([order], [divergence], delta)[0])


def _divergence(base: DpSgdEvent, order: float) -> float:
    """Returns the Rényi divergence of the base, whose steps dp-accounting composes one by one.

    Between two integer orders, sampled steps are charged the chord of (order - 1) times the divergence: the bound of
    theirs that is proved.
    """
    orders = np.array([order]) if base.sampling_rate == 1 else math.floor(order) + np.arange(2.0)
    accountant = RdpAccountant(orders[orders > 1])
    accountant.compose(_step(base), base.steps)
    moments = (orders[orders > 1] - 1) * np.asarray(accountant.rdp)
    return float(np.interp(order, orders, np.pad(moments, (len(orders) - len(moments), 0)))) / (order - 1)


def _losses(base: DpSgdEvent, interval: float = PLD_INTERVAL) -> PrivacyLossDistribution:
    accountant = PLDAccountant(value_discretization_interval=min(interval, PLD_INTERVAL))
    accountant.compose(_step(base), base.steps)
    return accountant._pld


def _step(base: DpSgdEvent) -> DpEvent:
    step = GaussianDpEvent(base.noise_multiplier)
    return step if base.sampling_rate == 1 else PoissonSampledDpEvent(base.sampling_rate, step)


def _trained(base: PrivateBase | None) -> str:
    if base is None:
        return "public"
    return f"trained on private text (epsilon {base.training.epsilon:g}, run {base.training.event.run})"


def weights_digest(model: Path) -> str:
    """Returns a SHA-256 (hexadecimal) of a model's weights, which copies by transformers keep. Empty if it has none."""
    digest = hashlib.sha256()
    tensors: dict[str, tuple[Path, Any]] = {}
    for file in model.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: (file, opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    for name in sorted(tensors):
        file, shape = tensors[name]
        with safe_open(file, framework="pt") as opened:
            values = opened.get_tensor(name).float().numpy()
        digest.update(json.dumps([name, shape]).encode() + values.tobytes())
    return digest.hexdigest() if tensors else ""
