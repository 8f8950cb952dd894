"""Defines the alert that webhooks receive. It does not depend on private text and contains no prompt."""

from datetime import UTC, datetime
from typing import Literal
from uuid import uuid4

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from privmix.keys.records import ShareLimit

AlertEvent = Literal[
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
    """Holds the body of a webhook request. Fields that do not apply are omitted.

    Attributes:
        id: stays the same when an alert is sent again, so that receivers can drop duplicates.
        event: what happened.
            `budget.threshold`, `budget.exhausted`: the ensemble's privacy budget passed a threshold or is spent;
            `share.threshold`, `share.exhausted`: the same for the share of a key or a group;
            `service.unavailable`: no private token can be generated and charged;
            `service.stalled`: requests wait and no token is released;
            `parts.unserved`: no copy of a shard answers.
        status: "firing" once when the condition begins, "resolved" once when it ends. Thresholds never resolve.
        ensemble: the model name that clients use.
        text: the alert as one sentence, in the field that Slack displays.
        fraction: the spent fraction of the budget or the share, in tokens.
        threshold: the threshold that `fraction` passed.
        subject: the owner of the share: `key NAME` or `group NAME`.
        limit: the limit of the share that the alert is about.
        spent, allowed: numbers of tokens.
        epsilon_spent, epsilon: set if the budget is enforced by a bound that does not depend on the data.
        seconds: how long the condition has lasted.
        reasons: why the condition holds, by actor or shard.
    """

    model_config = ConfigDict(frozen=True)

    id: str = Field(default_factory=lambda: f"msg_{uuid4().hex}")
    event: AlertEvent
    status: Literal["firing", "resolved"] = "firing"
    ensemble: str
    namespace: str
    time: AwareDatetime = Field(default_factory=lambda: datetime.now(UTC))
    text: str
    fraction: float | None = None
    threshold: float | None = None
    subject: str | None = None
    limit: ShareLimit | None = None
    spent: int | None = None
    allowed: int | None = None
    epsilon_spent: float | None = None
    epsilon: float | None = None
    seconds: float | None = None
    reasons: dict[str, str] | None = None

    def body(self) -> str:
        """Returns the alert as JSON."""
        return self.model_dump_json(exclude_none=True)
