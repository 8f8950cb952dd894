"""Defines keys, shares and usage as plain data."""

import re
import secrets
from dataclasses import dataclass
from datetime import datetime
from hashlib import sha256
from typing import Any, Self
from uuid import uuid4

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt
from sqlalchemy import RowMapping

PREFIX = "pmx_"
SECRET_BYTES = 32

_ID = re.compile(r"key_[0-9a-f]{12}")


def new_id() -> str:
    """Returns the id of a new key."""
    return f"key_{uuid4().hex[:12]}"


def is_id(text: str) -> bool:
    """Returns whether a text has the form of a key's id. Such a text is never a key's name."""
    return _ID.fullmatch(text) is not None


class Share(BaseModel):
    """Limits what a key may use; None is no limit.

    The sum of the shares may exceed the privacy budget: the ledger's filter enforces the guarantee independently.

    Attributes:
        tokens: the total number of private tokens.
        live_streams: concurrent generations, counting every choice of every prompt.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: NonNegativeInt | None = None
    live_streams: PositiveInt | None = None


class Key(BaseModel):
    """Describes a key without its secret."""

    model_config = ConfigDict(frozen=True)

    id: str
    name: str = Field(min_length=1, max_length=64)
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None
    share: Share = Share()

    @classmethod
    def of(cls, row: RowMapping) -> Self:
        """Returns the key of a row of the table of keys."""
        values = {name: row[name] for name in cls.model_fields if name != "share"}
        share = {name: row[name] for name in Share.model_fields}
        return cls.model_validate({**values, "share": share})

    def row(self) -> dict[str, Any]:
        """Returns the key's columns in the table of keys."""
        return self.model_dump(mode="json", exclude={"share"}) | self.share.model_dump()

    def valid(self, now: datetime) -> bool:
        """Returns whether the key is neither revoked nor expired."""
        return self.revoked is None and (self.expires is None or now < self.expires)


class ShareUsage(BaseModel):
    """Counts the tokens charged to a share. Running requests hold `held` tokens; others used `spent` tokens."""

    model_config = ConfigDict(frozen=True)

    spent: int = 0
    held: int = 0

    @property
    def charged(self) -> int:
        """All charged tokens."""
        return self.spent + self.held


class KeyAccount(BaseModel):
    """Holds a key and what it used."""

    model_config = ConfigDict(frozen=True)

    key: Key
    usage: ShareUsage


@dataclass(frozen=True)
class Secret:
    """Holds the secret text that authenticates a client. It is never stored."""

    text: str

    @classmethod
    def new(cls) -> Self:
        """Returns a new random secret."""
        return cls(PREFIX + secrets.token_urlsafe(SECRET_BYTES))

    @property
    def hash(self) -> str:
        """The SHA-256 of the text. A secret of 32 random bytes needs no slow hash."""
        return sha256(self.text.encode()).hexdigest()

    def __repr__(self) -> str:
        return "Secret(***)"
