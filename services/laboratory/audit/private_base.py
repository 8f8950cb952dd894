"""Checks, from the files alone, that a ledger charges the private base under an ensemble.

    faults(Path("ensemble"), "ledger.db", trained=[Path("base")])    # an empty tuple if all is well

It trusts neither the manifest nor the ledger's own sum. Whether a model was trained on private text follows from its
weights; what was spent is composed again by dp-accounting from the events alone.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from safetensors import safe_open

from privmix.services.budget import reader
from privmix.services.budget.filter import Filter
from privmix.services.budget.state import Balance
from privmix.services.privacy import accounting
from privmix.services.privacy.events import Event
from privmix.services.privacy.protocols.dp_sgd import DpSgdEvent
from privmix.services.training import public_model
from privmix.services.training.manifest import Manifest, PrivateBase, private_base
from privmix.services.training.private_base import is_trained, merged

PRECISION = 1e-6
"""The largest difference of an epsilon from dp-accounting's that rounding explains."""


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
    return (*_passed_as_public(model, manifest, trained), *_of_ledger(manifest, balance))


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


def _of_ledger(manifest: Manifest, balance: Balance) -> Iterator[str]:
    if balance.terms.ensemble != manifest.ensemble:
        yield "the ledger is another ensemble's"
    base, charged = manifest.private_base, balance.terms.base_event
    if base is not None and charged is None:
        yield f"the ledger does not charge the base, which was {_trained(base)}"
    elif base is not None and charged != base.training.event:
        yield f"the ledger charges one base and the parts are on another, which was {_trained(base)}; both are released"
    elif base is None and charged is not None:
        yield "the ledger charges a base, and the manifest has none"
    if balance.terms.base_apart and not manifest.base_apart:
        yield "the ledger counts the base's users as others than the parts', which the manifest does not show"
    if balance.terms.enforced == "bound" and base is not None:
        due, stated = _reference(balance, base.training.event, manifest.base_apart), _stated(balance)
        if abs(due - stated) > PRECISION:
            yield f"the ledger states epsilon {stated:.6f}, and the two events cost {due:.6f} at its order"


def _stated(balance: Balance) -> float:
    return Filter(balance.terms).epsilon(balance.charged)


def _reference(balance: Balance, base: DpSgdEvent, apart: bool) -> float:
    """Returns the epsilon of the ledger's tokens and the base, whose steps dp-accounting composes one by one."""
    orders = np.array([balance.terms.order])
    accountant = RdpAccountant(orders)
    step = GaussianDpEvent(base.noise_multiplier)
    accountant.compose(step if base.sampling_rate == 1 else PoissonSampledDpEvent(base.sampling_rate, step), base.steps)
    training = np.asarray(accountant.rdp)
    tokens = _divergence(dict(balance.charged), orders)
    paid = [training, tokens] if apart else [training + tokens]
    return max(float(compute_epsilon(orders, each, balance.terms.delta)[0]) for each in paid)


def _divergence(charged: dict[Event, int], orders: np.ndarray) -> np.ndarray:
    return np.asarray(accounting.rdp(charged, orders)) if charged else np.zeros(len(orders))


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
