"""What an operator says of alerts: where they go, and when."""

import base64
import binascii
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, HttpUrl, SecretStr, TypeAdapter, ValidationError, field_validator

SECRET_PREFIX = "whsec_"
LEAST_SECRET_BYTES = 24

_URL = TypeAdapter(HttpUrl)


class AlertSettings(BaseModel):
    """Webhooks are secrets, because the address of many a receiver is its password.

    Attributes:
        webhooks: URLs that each alert is posted to; none sends no alerts.
        secret: signs every alert as the Standard Webhooks specification does: `whsec_` and base64 of 24 bytes or more.
        thresholds: fractions of the budget and of each share.
        interval_s: between two looks at the service.
        patience_s: how long something must be wrong before an alert says so.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)

    webhooks: tuple[SecretStr, ...] = ()
    secret: SecretStr | None = None
    thresholds: tuple[Annotated[float, Field(gt=0, le=1)], ...] = (0.5, 0.8, 1.0)
    interval_s: float = Field(10.0, gt=0)
    patience_s: float = Field(60.0, ge=0)

    @field_validator("webhooks")
    @classmethod
    def _are_addresses(cls, webhooks: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        for number, webhook in enumerate(webhooks):
            try:
                _URL.validate_python(webhook.get_secret_value())
            except ValidationError:
                raise ValueError(f"number {number + 1} is no http or https URL; correct it") from None
        return webhooks

    @field_validator("secret")
    @classmethod
    def _is_long_enough(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and len(key_of(secret)) < LEAST_SECRET_BYTES:
            raise ValueError(
                f"must be {SECRET_PREFIX} and the base64 of {LEAST_SECRET_BYTES} bytes or more; make one with: "
                f'echo "{SECRET_PREFIX}$(openssl rand -base64 32)"'
            )
        return secret


def key_of(secret: SecretStr) -> bytes:
    """The key of the signatures; empty where the secret is not of the form that the specification gives."""
    prefix, _, text = secret.get_secret_value().partition("_")
    try:
        return base64.b64decode(text, validate=True) if f"{prefix}_" == SECRET_PREFIX else b""
    except binascii.Error:
        return b""
