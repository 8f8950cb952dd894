"""What gateways and the keys actor say to each other: plain data that crosses Ray."""

from dataclasses import dataclass, field
from typing import Literal

from services.keys.records import Scope

Refusal = Literal[
    "share_exhausted",
    "daily_share_exhausted",
    "requests_per_minute",
    "tokens_per_minute",
    "live_streams",
    "overloaded",
    "request_too_large",
    "larger_than_a_minute",
    "more_than_live_streams",
]
"""Of the last three no waiting helps: the share could never pay for such a request."""


@dataclass(frozen=True)
class Identity:
    """Who asks. `subjects` are the shares that tokens are charged to, the key's own first."""

    id: str
    name: str
    scopes: tuple[Scope, ...]
    subjects: tuple[str, ...]


@dataclass(frozen=True)
class NoKey:
    """The key shown is not one of this service, or not valid any more. `required` is False until there is a key."""

    reason: Literal["unknown", "expired", "revoked"]
    required: bool = True


@dataclass(frozen=True)
class Room:
    """Where the requests for one ensemble take turns.

    Attributes:
        ensemble: its name.
        capacity: generations that its coordinators advance together.
        max_waiting: generations that may wait behind them.
        shares: the name under which keys have shares of this ensemble alone, besides those for all ensembles.
    """

    ensemble: str
    capacity: int
    max_waiting: int
    shares: str | None = None


@dataclass(frozen=True)
class RateState:
    """What the `x-ratelimit-*` headers say: the limit, what is left of it, and seconds until all of it is there."""

    limit: int
    remaining: int
    reset_s: float


@dataclass(frozen=True)
class RateStates:
    """Of the narrowest shares; None where there is no limit."""

    requests: RateState | None = None
    tokens: RateState | None = None


@dataclass(frozen=True)
class Admitted:
    """`tokens` may be generated; `settle` must follow."""

    tokens: int
    rates: RateStates


@dataclass(frozen=True)
class Refused:
    """Nothing was charged.

    Attributes:
        limit: the value in the share that refuses.
        retry_after_s: None where no waiting helps, or where nobody knows how long to wait.
    """

    reason: Refusal
    limit: int | None = None
    retry_after_s: float | None = None
    rates: RateStates = field(default_factory=RateStates)


@dataclass
class Flow:
    """The answers of one ensemble, as one gateway has seen them since its last pulse.

    Nothing here depends on the private text, except through the tokens that were released and their times.

    Attributes:
        live: generations that run or wait now.
        tokens: tokens released, those of the public model included.
        first_token_s: seconds from each request to its first token.
    """

    live: int = 0
    tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)


@dataclass
class Pulse:
    """What one gateway has seen since its last pulse.

    Attributes:
        requests: requests for an answer, refused ones included.
        refusals: requests refused, by the code of the error.
        flows: by ensemble.
    """

    requests: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    flows: dict[str, Flow] = field(default_factory=dict)
