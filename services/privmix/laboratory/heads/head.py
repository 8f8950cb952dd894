"""Trains heads, stores them in directories with a manifest, and predicts with them.

trained = train(table, "expm-certified", 1.0, Path("head"))
predict(Path("head"), table)
"""

import secrets
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors.torch import load_file, save_file

from privmix.budget.ledger import charge_release
from privmix.foundation.errors import InputError
from privmix.foundation.files import building, sha256, write_atomically
from privmix.laboratory.heads import MethodName, methods
from privmix.laboratory.heads.methods import METHODS
from privmix.laboratory.heads.models import predictions
from privmix.laboratory.heads.table import Table
from privmix.privacy.arrays import Reals

MANIFEST, PARAMETERS = "manifest.json", "head.safetensors"


class HeadManifest(BaseModel):
    """Describes a head.

    Attributes:
        method: the training method.
        epsilon: the epsilon of its training; None if the method has none.
        guarantee: its guarantee, in words.
        event: the privacy event of its release (`Event.to_json`); None if nothing is certified.
        model: the built-in model.
        features: the number of features, or of variables of time series.
        sha256: the hash of the parameters' file.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format_version: Literal[1] = 1
    method: MethodName
    epsilon: float | None
    guarantee: str
    event: str | None
    model: Literal["logistic-regression", "gru-d"]
    features: int = Field(ge=1)
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
) -> HeadManifest:
    """Trains one head with the setting chosen in advance. Charges the ledger once, before it writes anything.

    Args:
        ledger: a SQLite file or a URL. Only methods with a proven guarantee can be charged.
        budget: the epsilon of a new ledger, for all heads of this table; by default that of this head.

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
    event = None if method.event is None else method.event(table, epsilon)
    if ledger is not None and event is not None:
        charge_release(ledger, event, f"heads of {table.name}", budget or method.ledger_share * epsilon, methods.DELTA)
    theta = method.train(table, epsilon, event, secrets.randbelow(2**31))[0]
    with building(output) as unfinished:
        save_file({"theta": theta.detach().float().contiguous()}, unfinished / PARAMETERS)
        manifest = HeadManifest(
            method=name,
            epsilon=epsilon if method.private else None,
            guarantee=method.guarantee,
            event=None if event is None else event.to_json(),
            model="gru-d" if table.series else "logistic-regression",
            features=table.features,
            sha256=sha256(unfinished / PARAMETERS),
        )
        write_atomically(unfinished / MANIFEST, manifest.model_dump_json(indent=2).encode() + b"\n")
    return manifest


def predict(directory: Path, table: Table) -> Reals:
    """Returns the head's outputs in [0, 1] for the rows of a table, float64 [n].

    Raises:
        InputError: there is no head, or the table has another number of features.
    """
    manifest = HeadManifest.load(directory)
    if table.features != manifest.features or table.series != (manifest.model == "gru-d"):
        raise InputError(f"head {directory}: reads {manifest.features} features, but {table.name} has {table.features}")
    theta = load_file(directory / PARAMETERS)["theta"]
    outputs: Reals = predictions(methods.built(table), theta[None], table.x)[0]
    return outputs
