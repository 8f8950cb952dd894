"""What a row of the ledger records."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from services.budget.privacy_budget import PrivacyBudget
from services.privacy.events import from_json

# The most tokens one lease may ask for. It only keeps counts inside every database's and every reader's integers.
LARGEST_LEASE = 2**31 - 1

Count = Annotated[int, Field(ge=0, le=LARGEST_LEASE, strict=True)]


class Record(BaseModel):
    """One row's body. Fields are never renamed or given another meaning: old ledgers are read for ever."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")
    kind: ClassVar[str]


class Opened(Record):
    """The first row: what is promised. `id` names this ledger for ever; without it, the hash of this row does."""

    kind = "terms"
    format: Literal[1] = 1
    id: str | None = Field(None, min_length=1, max_length=64)
    terms: PrivacyBudget
    stop_after: int | None = Field(None, gt=0, description="measured tokens, drawn where the terms ask for it")


class Epoch(Record):
    """A writer took over; the row's `epoch` is its own, and every writer before it is fenced out.

    `writer` names it. `holder` names the deployment that it writes for, through restarts of the budget actor.
    """

    kind = "epoch"
    writer: str | None = None
    holder: str | None = None


class Leased(Record):
    """`count` tokens at the cost of `event` are charged, whether or not they are ever released."""

    kind = "lease"
    lease: str = Field(min_length=1, max_length=64)
    event: dict[str, Any]
    count: Annotated[Count, Field(gt=0)]


class Settled(Record):
    """Of that lease `used` tokens were released, and the rest never will be."""

    kind = "settle"
    lease: str
    used: Count


class Charged(Record):
    """`count` tokens at the cost of `event` were charged just before their release, with the sum of their losses.

    `losses` holds one number for every part alike, or one for each part. They depend on the private text.
    """

    kind = "charge"
    charge: str = Field(min_length=1, max_length=64)
    event: dict[str, Any]
    count: Annotated[Count, Field(gt=0)]
    losses: tuple[float, ...] = Field(min_length=1)


class Stopped(Record):
    """A token's measured losses no longer fitted into the budget: nothing private is released ever after."""

    kind = "stop"
    charge: str = Field(min_length=1, max_length=64)


class Forfeited(Record):
    """`count` tokens at the cost of `event` may have been released without a row, which a restored backup lacks."""

    kind = "forfeit"
    event: dict[str, Any]
    count: Annotated[Count, Field(gt=0)]


class Checkpoint(Record):
    """Everything that the rows before add up to, so that a writer need not read them when it starts.

    `events` are referred to by their index. `leases` holds name, event, tokens and tokens used (None while the lease
    is open) of the open leases and of the closed ones that are still remembered; `charges` names and tokens of
    remembered charges. `alike` and `parts` are the measured losses. `writer` is the one of the current epoch, and
    `holders` are the last deployments that it or others wrote for, the current one at the end.
    """

    kind = "checkpoint"
    id: str
    terms: PrivacyBudget
    stop_after: int | None
    events: tuple[dict[str, Any], ...]
    charged: tuple[Annotated[int, Field(ge=0)], ...]
    latest: int | None
    leases: tuple[tuple[str, int, int, int | None], ...]
    charges: tuple[tuple[str, int], ...]
    alike: float
    parts: tuple[float, ...]
    stopped: bool
    writer: str | None
    holders: tuple[str | None, ...]


class Moved(Record):
    """The last row: the ledger goes on in the database `to`, without this row, and never here."""

    kind = "moved"
    to: str = Field(min_length=1, description="the path, or the URL without its password")


_RECORDS = (Opened, Epoch, Leased, Settled, Charged, Stopped, Forfeited, Checkpoint, Moved)
KINDS: dict[str, type[Record]] = {record.kind: record for record in _RECORDS}

__all__ = [
    "KINDS",
    "LARGEST_LEASE",
    "Charged",
    "Checkpoint",
    "Epoch",
    "Forfeited",
    "Leased",
    "Moved",
    "Opened",
    "Record",
    "Settled",
    "Stopped",
    "from_json",
]
