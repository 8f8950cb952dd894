"""Trains heads, stores them in directories with a manifest, and predicts with them.

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

from privmix.budget.ledger import charge_release
from privmix.foundation.errors import InputError
from privmix.foundation.files import building, sha256, write_atomically
from privmix.laboratory.heads import certified, methods, sgd
from privmix.laboratory.heads.methods import METHODS
from privmix.laboratory.heads.names import MethodName
from privmix.laboratory.heads.score import outputs
from privmix.laboratory.heads.table import Table
from privmix.privacy.events import Event
from privmix.privacy.protocols.dp_sgd import DpSgdEvent
from privmix.privacy.sampling.selection import Neighbours

MANIFEST, PARAMETERS = "manifest.json", "head.safetensors"

# A ledger converts at one Rényi order, which yields a larger epsilon than the accountant that determined the noise.
_RENYI_SHARE = 1.5


class HeadManifest(BaseModel):
    """Describes a head.

    Attributes:
        head: the random id of the head.
        method: the training method.
        epsilon: the epsilon of its training; None if the method has none.
        guarantee: its guarantee, in words.
        event: the privacy event of its release (`Event.to_json`); None if nothing is certified.
        model: the built-in model.
        features: the number of features, or of variables of time series.
        dataset: the name of the table.
        sha256: the hash of the parameters' file.
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
        """Reads a head's manifest and verifies the hash of its parameters.

        Raises:
            InputError: the manifest is missing or invalid, or the parameters differ.
        """
        path = directory / MANIFEST
        try:
            manifest = cls.model_validate_json(path.read_bytes())
            actual = sha256(directory / PARAMETERS)
        except OSError as error:
            raise InputError(f"head {directory}: cannot be read ({error.strerror}); see `heads train`") from error
        except ValidationError as error:
            raise InputError(f"{path}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
        if actual != manifest.sha256:
            raise InputError(f"head {directory}: its parameters are not the ones in the manifest; train it again")
        return manifest


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
    """Trains one head with the setting chosen in advance. Charges the ledger once, before it writes anything.

    Args:
        ledger: a SQLite file or a URL. Only methods with a proven guarantee can be charged.
        budget: the epsilon of a new ledger, for all heads of this table; by default that of this head.
        neighbours: the adjacency of the certified variant.
        public: public rows, for the certified variant's candidates.

    Raises:
        InputError: the method, the table or a setting is invalid.
        WorkError: the ledger's budget does not suffice. Nothing was written.
    """
    if (output / MANIFEST).exists():
        raise InputError(f"output {output}: already contains a head; choose another directory")
    if ledger is not None:
        methods.demand_certified(name)
    methods.demand_fit(name, table)
    method = METHODS[name]
    event: Event | None = None
    make = methods.build(table)
    if name == "expm-certified":
        model = methods.parametrised(table)
        event = selection = certified.event(table, epsilon, methods.CERTIFIED, neighbours)
        _charge(ledger, selection, table, budget or epsilon)
        theta = certified.release(model, table, selection, methods.CERTIFIED, public=public, seed=0)
    elif name == "dp-sgd":
        noise = sgd.noise_for(
            epsilon, methods.DELTA, table.stated_population, methods.DP_SGD.batch, methods.DP_SGD.epochs
        )
        event = training = DpSgdEvent("record", noise.multiplier, noise.rate, noise.steps, uuid.uuid4().hex)
        _charge(ledger, training, table, budget or _RENYI_SHARE * epsilon)
        theta = methods.train_with_noise(make, table, noise, methods.DP_SGD)
    else:
        theta = method.train(make, table, epsilon, method.advance, int.from_bytes(uuid.uuid4().bytes[:4]))[0]
    return _write(output, table, name, epsilon if method.private else None, event, theta)


def predict(directory: Path, table: Table) -> NDArray[np.float64]:
    """Returns the head's outputs in [0, 1] for the rows of a table, float64 [n].

    Raises:
        InputError: there is no head, or the table has another number of features.
    """
    manifest = HeadManifest.load(directory)
    if table.features != manifest.features or table.series != (manifest.model == "gru-d"):
        raise InputError(f"head {directory}: reads {manifest.features} features, but {table.name} has {table.features}")
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


def _charge(ledger: str | None, event: Event, table: Table, budget: float) -> None:
    if ledger is not None:
        charge_release(ledger, event, f"heads of {table.name}", budget, methods.DELTA)
