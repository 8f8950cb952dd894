"""Defines the operator's settings for alerts."""

import base64
import binascii
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, HttpUrl, SecretStr, TypeAdapter, ValidationError, field_validator

SECRET_PREFIX = "whsec_"
LEAST_SECRET_BYTES = 24

_URL = TypeAdapter(HttpUrl)


class AlertSettings(BaseModel):
    """Holds the section `alerts` of the configuration.

    Attributes:
        webhooks: URLs that receive each alert. Without one, no alerts are sent. They are secrets, because many
            services authenticate a sender by the URL alone.
        secret: signs every alert by the Standard Webhooks specification: `whsec_` and base64 of 24 bytes or more.
        thresholds: fractions of the budget and of each share at which an alert fires.
        interval_s: the time between two checks of the service.
        patience_s: how long a problem must last before an alert fires.
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
                raise ValueError(f"number {number + 1} is not an http or https URL; correct it") from None
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
    """Returns the key for signatures; empty if the secret does not have the format of the specification."""
    prefix, _, text = secret.get_secret_value().partition("_")
    try:
        return base64.b64decode(text, validate=True) if f"{prefix}_" == SECRET_PREFIX else b""
    except binascii.Error:
        return b""
