"""A trained head: a directory with its parameters and a manifest, from which it predicts.

trained = train(table, "expm-certified", 1.0, Path("head"))
predict(Path("head"), table)
"""

import uuid
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load_file, save_file
from torch import Tensor

from services.budget.ledger import Ledger
from services.budget.privacy_budget import PrivacyBudget
from services.errors import InputError, WorkError
from services.files import building, sha256, write_atomically
from services.heads import certified, methods, sgd
from services.heads.data import Table
from services.heads.methods import METHODS, MethodName
from services.heads.score import outputs
from services.privacy.events import Event
from services.privacy.protocols.dp_sgd import DpSgdEvent
from services.privacy.sampling.selection import Neighbours

MANIFEST, PARAMETERS = "manifest.json", "head.safetensors"

# The Rényi order at which a head's ledger is enforced: pure epsilons cost least at high ones.
_ORDER = 64.0
# A ledger converts at one Rényi order, which gives a larger epsilon than the accountant that the noise was chosen by.
_RENYI_SHARE = 1.5


class HeadManifest(BaseModel):
    """What a head is.

    Attributes:
        head: its random name.
        method: how it was trained.
        epsilon: that it was trained with; None where the method takes none.
        guarantee: what is promised of it, in words.
        event: what its release cost, as a ledger records it; None where nothing is certified.
        model: which built-in model the parameters are of.
        features: how many features, or variables of time series, it reads.
        dataset: the name of the table.
        sha256: of the parameters' file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[1] = 1
    head: str = Field(min_length=1)
    method: MethodName
    epsilon: float | None
    guarantee: str
    event: str | None
    model: Literal["logistic-regression", "gru-d"]
    features: int = Field(ge=1)
    dataset: str
    sha256: str

    @classmethod
    def load(cls, directory: Path) -> "HeadManifest":
        """Read a head's manifest, and check that its parameters are the ones it names.

        Raises:
            InputError: there is none, or the parameters are others.
        """
        path = directory / MANIFEST
        try:
            found = cls.model_validate_json(path.read_bytes())
            actual = sha256(directory / PARAMETERS)
        except OSError as error:
            raise InputError(f"head {directory}: cannot be read ({error.strerror}); see `heads train`") from error
        except ValidationError as error:
            raise InputError(f"{path}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
        if actual != found.sha256:
            raise InputError(f"head {directory}: its parameters are not the ones in the manifest; train it again")
        return found


def train(
    table: Table,
    name: MethodName,
    epsilon: float,
    output: Path,
    *,
    ledger: str | None = None,
    budget: float | None = None,
    neighbours: Neighbours = "replace",
    public: Table | None = None,
) -> HeadManifest:
    """Train one head with the setting chosen in advance, and charge its ledger once, before anything is written.

    Args:
        ledger: SQLite file or URL; only methods whose guarantee is proven can be charged.
        budget: epsilon that a new ledger promises for all heads of this table; by default that of this one.
        neighbours: for the certified variant, the tables that an observer cannot tell apart.
        public: rows that are not private, for the certified variant's candidates.

    Raises:
        InputError: the method, the table or a setting cannot be used.
        WorkError: the ledger's budget does not suffice; nothing was written.
    """
    if (output / MANIFEST).exists():
        raise InputError(f"output {output}: holds a head, whose cost is spent; name another directory")
    if ledger is not None:
        methods.demand_certified(name)
    method = METHODS[name]
    event: Event | None = None
    make = methods.build(table)
    if name == "expm-certified":
        settings = certified.CertifiedSettings.model_validate(method.advance.model_dump())
        model = methods.parametrised(table)
        event = selection = certified.event(table, epsilon, settings, neighbours)
        _charge(ledger, selection, table, budget or epsilon)
        theta = certified.release(model, table, selection, settings, public=public, seed=0)
    elif name == "dp-sgd":
        private = sgd.DpSgdSettings.model_validate(method.advance.model_dump())
        noise = sgd.noise_for(epsilon, methods.DELTA, len(table.x), private.batch, private.epochs)
        event = training = DpSgdEvent("record", noise.multiplier, noise.rate, noise.steps, uuid.uuid4().hex)
        _charge(ledger, training, table, budget or _RENYI_SHARE * epsilon)
        theta = methods.train_with_noise(make, table, noise, private)
    else:
        theta = method.train(make, table, epsilon, method.advance, int.from_bytes(uuid.uuid4().bytes[:4]))[0]
    return _write(output, table, name, epsilon if method.private else None, event, theta)


def predict(directory: Path, table: Table) -> NDArray[np.float64]:
    """float64 [n]: the head's outputs in [0, 1] for the rows of a table.

    Raises:
        InputError: there is no head, or the table has other features.
    """
    manifest = HeadManifest.load(directory)
    if table.features != manifest.features or table.series != (manifest.model == "gru-d"):
        raise InputError(f"head {directory}: reads {manifest.features} features, and {table.name} has {table.features}")
    theta = load_file(directory / PARAMETERS)["theta"]
    predictions: NDArray[np.float64] = outputs(methods.parametrised(table), theta[None], table)[0]
    return predictions


def _write(
    output: Path, table: Table, name: MethodName, epsilon: float | None, event: Event | None, theta: Tensor
) -> HeadManifest:
    with building(output) as unfinished:
        save_file({"theta": theta.detach().float().contiguous()}, unfinished / PARAMETERS)
        manifest = HeadManifest(
            head=uuid.uuid4().hex,
            method=name,
            epsilon=epsilon,
            guarantee=METHODS[name].guarantee,
            event=None if event is None else event.to_json(),
            model="gru-d" if table.series else "logistic-regression",
            features=table.features,
            dataset=table.name,
            sha256=sha256(unfinished / PARAMETERS),
        )
        write_atomically(unfinished / MANIFEST, manifest.model_dump_json(indent=2).encode() + b"\n")
    return manifest


def _charge(ledger: str | None, event: Event, table: Table, epsilon: float | None) -> None:
    """Charge one release durably.

    Raises:
        WorkError: the budget does not suffice.
    """
    if ledger is None:
        return
    promise = PrivacyBudget(
        ensemble=f"heads of {table.name}",
        epsilon=epsilon,
        delta=methods.DELTA,
        order=_ORDER,
        adjacency=event.guarantee.adjacency,
    )
    if Ledger(ledger, promise).lease(event, 1).count == 0:
        raise WorkError(f"ledger {ledger}: its budget does not suffice for another head; nothing was released")
