"""Defines the messages between gateways and the keys actor: plain data that Ray sends."""

from dataclasses import dataclass, field
from typing import Literal

Refusal = Literal[
    "share_exhausted",
    "live_streams",
    "overloaded",
    "request_too_large",
]
"""Waiting does not help after the last one: such a request is never admitted."""


@dataclass(frozen=True)
class Identity:
    """Identifies the key of a request.

    Attributes:
        live_streams: the limit of the key's share; None without one.
        charged: whether the keys actor admits its requests and charges its share.
    """

    id: str
    name: str
    live_streams: int | None = None
    charged: bool = True


@dataclass(frozen=True)
class InvalidKey:
    """Reports that a key is missing, unknown or no longer valid. `required` is False while no key exists."""

    reason: Literal["unknown", "expired", "revoked"]
    required: bool = True


@dataclass(frozen=True)
class AdmissionLimits:
    """Limits how many generations a service runs and queues.

    Attributes:
        capacity: the number of generations that its coordinators run at the same time.
        max_waiting: the number of further generations that may wait.
    """

    capacity: int
    max_waiting: int

    @property
    def largest_request(self) -> int:
        """The number of generations that a request may have, so that it leaves places for others."""
        return max(1, self.capacity // 2)

    @property
    def max_waiting_of_key(self) -> int:
        """The number of generations of one key that may wait."""
        return min(self.max_waiting, max(1, self.max_waiting // 4))


@dataclass(frozen=True)
class Admitted:
    """Allows a request to generate `tokens` tokens. The gateway must call `settle` afterwards."""

    tokens: int


@dataclass(frozen=True)
class Refused:
    """Refuses a request. Nothing was charged.

    Attributes:
        limit: the number of concurrent generations that the request exceeds.
        retry_after_s: None if waiting does not help or the time is unknown.
    """

    reason: Refusal
    limit: int | None = None
    retry_after_s: float | None = None


@dataclass
class TrafficUpdate:
    """Counts the traffic of one gateway since its last update.

    It depends on private text only through the released tokens and their times.

    Attributes:
        refusals: the number of refused requests by error code.
        live: the number of generations that run or wait now.
        tokens: the number of released tokens, including tokens of the public model.
    """

    refusals: dict[str, int] = field(default_factory=dict)
    live: int = 0
    tokens: int = 0
