"""Defines the records in the rows of a ledger."""

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from privmix.budget.privacy_budget import PrivacyBudget
from privmix.privacy.protocols.individual import WHOLE

# The maximum number of tokens in a lease. It keeps counts within the integers of every database and reader.
MAX_LEASE = 2**31 - 1

Count = Annotated[int, Field(ge=0, le=MAX_LEASE, strict=True)]
StoredGrains = tuple[Annotated[int, Field(ge=0, le=WHOLE, strict=True)], ...]


class Record(BaseModel):
    """Holds the body of a row. Fields never change their names or meanings, because old ledgers must stay readable."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
    kind: ClassVar[str]


class Opened(Record):
    """Opens the ledger and states its budget. `id` is the ledger's permanent id."""

    kind = "terms"
    id: str = Field(min_length=1, max_length=64)
    terms: PrivacyBudget
    stop_after: int | None = Field(None, ge=0, description="measured tokens, drawn where the terms ask for it")


class Epoch(Record):
    """Records that a writer took over: the row begins its epoch and fences out all earlier writers.

    `writer` identifies the writer, `holder` its deployment, which outlives restarts of the budget actor.
    `clients_needed_keys` says that clients of the deployment needed a key.
    """

    kind = "epoch"
    writer: str | None = None
    holder: str | None = None
    clients_needed_keys: bool = False


class Leased(Record):
    """Charges `count` tokens at the cost of `event`, whether or not they are released.

    `allowances` are the grains that each token may charge to each part's account, for an event with accounts.
    """

    kind = "lease"
    lease: str = Field(min_length=1, max_length=64)
    event: dict[str, Any]
    count: Annotated[Count, Field(gt=0)]
    allowances: StoredGrains = ()


class Settled(Record):
    """Settles a lease: `used` of its tokens were released, and the others never will be.

    `charges` are the grains that the tokens charged to each part's account. They depend on the private text.
    """

    kind = "settle"
    lease: str
    used: Count
    charges: StoredGrains = ()


class Charged(Record):
    """Charges `count` tokens of `event` before their release, with the sum of their measured losses.

    `losses` holds one number that holds for all parts, or one for each part. They depend on the private text.
    """

    kind = "charge"
    charge: str = Field(min_length=1, max_length=64)
    event: dict[str, Any]
    count: Annotated[Count, Field(gt=0)]
    losses: tuple[float, ...] = Field(min_length=1)


class Stopped(Record):
    """Stops the ledger for ever, because the measured losses of a token exceeded the budget."""

    kind = "stop"
    charge: str = Field(min_length=1, max_length=64)


class Forfeited(Record):
    """Charges `count` tokens of `event` that may have been released after the backup that was restored.

    `charges` are the most that these tokens can have charged to each part's account.
    """

    kind = "forfeit"
    event: dict[str, Any]
    count: Annotated[Count, Field(gt=0)]
    charges: StoredGrains = ()


class Checkpoint(Record):
    """Stores the state after all previous rows, so that a writer need not read them when it starts.

    Attributes:
        events: the distinct events. Other fields refer to them by index.
        charged: the number of tokens charged for each event.
        leases: name, event, tokens and used tokens (None while open) of open leases and recent closed leases.
        allowances: the allowances of open leases with accounts, by the lease's name.
        accounts: the grains charged to each part's account.
        charges: the names and tokens of recent charges.
        alike, parts: the measured losses (`Losses`).
        writer: the writer of the current epoch.
        holders: the last deployments that held the ledger; the current one comes last.
        clients_needed_keys: whether clients of a deployment ever needed a key.
    """

    kind = "checkpoint"
    id: str
    terms: PrivacyBudget
    stop_after: int | None
    events: tuple[dict[str, Any], ...]
    charged: tuple[Annotated[int, Field(ge=0)], ...]
    latest: int | None
    leases: tuple[tuple[str, int, int, int | None], ...]
    allowances: dict[str, StoredGrains] = {}
    accounts: StoredGrains = ()
    charges: tuple[tuple[str, int], ...]
    alike: float
    parts: tuple[float, ...]
    stopped: bool
    writer: str | None
    holders: tuple[str | None, ...]
    clients_needed_keys: bool = False


class Signed(Record):
    """Signs the chain up to the row before this one (`budget/signing.py`). `key` is the key's public name."""

    kind = "signature"
    key: str = Field(min_length=1, max_length=64)
    signature: str = Field(min_length=64, max_length=64)


_RECORDS = (Opened, Epoch, Leased, Settled, Charged, Stopped, Forfeited, Checkpoint, Signed)
KINDS: dict[str, type[Record]] = {record.kind: record for record in _RECORDS}
