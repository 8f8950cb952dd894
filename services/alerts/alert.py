"""One alert, as receivers get it. Nothing in it depends on the private text, and it names no prompt."""

from datetime import UTC, datetime
from typing import Literal
from uuid import uuid4

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

Event = Literal[
    "budget.threshold",
    "budget.exhausted",
    "share.threshold",
    "share.exhausted",
    "service.unavailable",
    "service.stalled",
    "parts.unserved",
    "test",
]


class Alert(BaseModel):
    """The body of a webhook; fields that do not apply are left out.

    Attributes:
        id: the same when an alert is sent again, so that a receiver can leave out what it has.
        event: what happened.
            `budget.threshold`, `budget.exhausted`: of the privacy budget of the ensemble;
            `share.threshold`, `share.exhausted`: of the share of a key or a group;
            `service.unavailable`: no private token can be made and charged;
            `service.stalled`: requests wait and no token is released;
            `parts.unserved`: no copy of a shard answers.
        status: "firing" once when it begins, "resolved" once when it is over. Thresholds are never resolved.
        ensemble: the model name that clients use.
        text: the alert as one sentence; Slack and those like it show this field.
        fraction: of the budget or the share that is spent, in tokens.
        threshold: which one it passed.
        subject: whose share it is: `key NAME` or `group NAME`.
        limit: which limit of the share.
        spent, allowed: tokens.
        epsilon_spent, epsilon: of the budget, where it is limited by a bound that does not depend on the data.
        seconds: how long it has lasted.
        reasons: by actor or shard.
    """

    model_config = ConfigDict(frozen=True)

    id: str = Field(default_factory=lambda: f"msg_{uuid4().hex}")
    event: Event
    status: Literal["firing", "resolved"] = "firing"
    ensemble: str
    namespace: str
    time: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))
    text: str
    fraction: float | None = None
    threshold: float | None = None
    subject: str | None = None
    limit: Literal["tokens", "tokens_per_day"] | None = None
    spent: int | None = None
    allowed: int | None = None
    epsilon_spent: float | None = None
    epsilon: float | None = None
    seconds: float | None = None
    reasons: dict[str, str] | None = None

    def body(self) -> str:
        return self.model_dump_json(exclude_none=True)
