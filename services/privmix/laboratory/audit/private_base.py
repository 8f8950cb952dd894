"""Checks, from the files alone, that a ledger charges the private base under an ensemble.

    faults(Path("ensemble"), "ledger.db", trained=[Path("base")])    # an empty tuple if all is well

It does not trust the manifest: whether a model was trained on private text follows from its weights.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open

from privmix.budget import reading
from privmix.budget.state import Balance
from privmix.training import public_model
from privmix.training.manifest import Manifest, PrivateBase, private_base
from privmix.training.private_base import is_trained, merged


def faults(ensemble: Path, ledger: str, trained: Sequence[Path] = ()) -> tuple[str, ...]:
    """Returns what is wrong with the private base under an ensemble and its charge, each in one sentence.

    Args:
        trained: known directories of `privmix train-base`. A base model that has the weights of one of them was
            trained on private text, whatever its description says.

    Raises:
        InputError: the ensemble or a directory cannot be read (includes `ManifestError` and `PublicModelError`).
        LedgerError: the ledger cannot be read.
    """
    manifest, balance = Manifest.load(ensemble), reading.read(ledger)
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
