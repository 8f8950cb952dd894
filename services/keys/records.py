"""Keys and shares as plain data."""

import secrets
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Literal, Self, get_args

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt

Scope = Literal["generate", "privacy", "administer"]
"""`generate`: completions and chats, tokens; `privacy`: `/v1/privacy` and the console's numbers; `administer`: keys."""

SCOPES: tuple[Scope, ...] = get_args(Scope)
CLIENT_SCOPES: tuple[Scope, ...] = ("generate", "privacy")

PREFIX = "pmx_"
SECRET_BYTES = 32


class KeysError(Exception):
    """What was asked of the keys cannot be done; the message says why, and names the fix."""


class UnknownKey(KeysError):  # noqa: N818 (the name says the state)
    """There is no key of this id or name."""


class KeysUnavailable(KeysError):  # noqa: N818
    """The database of the keys cannot be used; the message says why."""


class Share(BaseModel):
    """What a key, or a group of keys, may use; None is no limit.

    Shares are slices of one guarantee. They may add up to more than the budget: the ledger's filter holds anyway.

    Attributes:
        tokens: of the privacy budget, in all.
        tokens_per_day: of the privacy budget, from midnight to midnight UTC.
        requests_per_minute: refilled evenly.
        tokens_per_minute: refilled evenly; what a request asks for counts until it is known what it used.
        live_streams: generations at one time, every choice of every prompt.
        largest_request: tokens that one request may ask for: prompts x choices x max_tokens.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens: NonNegativeInt | None = None
    tokens_per_day: NonNegativeInt | None = None
    requests_per_minute: PositiveInt | None = None
    tokens_per_minute: PositiveInt | None = None
    live_streams: PositiveInt | None = None
    largest_request: PositiveInt | None = None


class Key(BaseModel):
    """One key, without its secret. `hint` is the beginning of the secret, to recognise it by.

    `group` names a share that several keys have together, besides the share of each.
    """

    model_config = ConfigDict(frozen=True)

    id: str
    name: str = Field(min_length=1, max_length=64)
    owner: str = Field("", max_length=128)
    group: str | None = Field(None, min_length=1, max_length=64)
    scopes: tuple[Scope, ...] = CLIENT_SCOPES
    hint: str
    created: AwareDatetime
    expires: AwareDatetime | None = None
    revoked: AwareDatetime | None = None

    def valid(self, now: datetime) -> bool:
        return self.revoked is None and (self.expires is None or now < self.expires)


class Usage(BaseModel):
    """Tokens charged to a share. `held` are reserved by requests that have not ended; they are charged already."""

    model_config = ConfigDict(frozen=True)

    spent: int = 0
    held: int = 0
    spent_today: int = 0
    held_today: int = 0

    @property
    def charged(self) -> int:
        return self.spent + self.held

    def __sub__(self, other: "Usage") -> "Usage":
        return Usage(**{name: getattr(self, name) - getattr(other, name) for name in Usage.model_fields})


class ShareAccount(BaseModel):
    """A share, and what was used of it."""

    model_config = ConfigDict(frozen=True)

    share: Share
    usage: Usage


class KeyAccount(BaseModel):
    """A key with its share and what it used; with its group's share, where it has a group.

    `ensembles` and `group_ensembles` are, by ensemble, what is for that one alone; `share` and `usage` are for all
    ensembles together.
    """

    model_config = ConfigDict(frozen=True)

    key: Key
    share: Share
    usage: Usage
    ensembles: dict[str, ShareAccount] = {}
    group_share: Share | None = None
    group_usage: Usage | None = None
    group_ensembles: dict[str, ShareAccount] = {}


@dataclass(frozen=True)
class Secret:
    """What a client shows; it is stored nowhere."""

    text: str

    @classmethod
    def new(cls) -> Self:
        return cls(PREFIX + secrets.token_urlsafe(SECRET_BYTES))

    @property
    def hash(self) -> str:
        """SHA-256. A secret of 32 random bytes needs no slow hash."""
        return sha256(self.text.encode()).hexdigest()

    @property
    def hint(self) -> str:
        return self.text[: len(PREFIX) + 4]

    def __repr__(self) -> str:
        return "Secret(***)"


def now() -> datetime:
    return datetime.now(UTC)
