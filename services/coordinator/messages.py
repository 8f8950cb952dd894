"""What the gateway and the coordinator say to each other: plain data that crosses Ray."""

from dataclasses import dataclass
from typing import Literal

from services.privacy.mollifiers.shaping import SamplingOptions

FinishReason = Literal["stop", "length", "privacy_budget", "share", "error", "cancelled"]
"""`share`: the key that asked has nothing left of its share (said by the gateway, which keeps shares)."""


@dataclass(frozen=True)
class Generation:
    """One answer to produce; a request with several prompts or choices is several of these.

    `prompt` holds token ids; `max_tokens` counts released tokens, each of which is charged; `stop` holds the strings
    that end the answer and are not part of it; with `ignore_eos` the model's end token does not end it. `trace` is the
    W3C traceparent of the request, where it is traced.

    `released` holds the tokens that another coordinator released for this answer before it was lost: they follow the
    prompt, they count towards `max_tokens`, and their text is not repeated.
    """

    id: str
    prompt: tuple[int, ...]
    options: SamplingOptions
    max_tokens: int
    stop: tuple[str, ...] = ()
    trace: str | None = None
    ignore_eos: bool = False
    released: tuple[int, ...] = ()


@dataclass(frozen=True)
class Delta:
    """What is new in one generation.

    `token_ids` holds the tokens released (and charged) since the delta before; `text` may be empty although tokens were
    released, while it could still become a stop string or half a character. `public` says that the public model alone
    answered, at no charge. The last delta of a generation, and no other, has a `finish_reason`. After "error",
    `retry_after` says in how many seconds the same request can succeed; None where a repetition does not help.
    """

    id: str
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    public: bool = False
    retry_after: float | None = None

    @property
    def tokens(self) -> int:
        """How many tokens were released."""
        return len(self.token_ids)


class CoordinatorError(Exception):
    """Why a submission was not taken: none of its generations has begun and nothing was charged."""


class Overloaded(CoordinatorError):  # noqa: N818 (the name says the state, as HTTP's reasons do)
    """There is no room now; `retry_after` is in seconds."""

    def __init__(self, retry_after: float = 1.0) -> None:
        super().__init__(retry_after)
        self.retry_after = retry_after

    def __str__(self) -> str:
        return f"too many generations are waiting; try again in {self.retry_after:g} s"


class Unavailable(CoordinatorError):  # noqa: N818
    """A part of the service that the answer needs does not answer; the message names it."""
