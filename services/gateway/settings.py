"""What the gateway must be told; checked on construction, unknown names refused."""

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    field_validator,
)

from services.batches.settings import BatchSettings
from services.ensembles.records import Ensemble
from services.gateway.fields import LEAST_TEMPERATURE, Nearest


class GatewaySettings(BaseModel):
    """Settings of one gateway replica.

    No `api_keys` means that every client is let in. The defaults for the length of an answer give way to `max_tokens`
    and to the context of the model.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    namespace: str = "privmix"
    """Of the actors that all ensembles share: those of the keys, of the batches and of the list of ensembles."""
    ensembles: tuple[Ensemble, ...]
    """Those that are served while `ensembles_actor` does not say otherwise."""
    ensembles_actor: str | None = None
    """None: only `ensembles` are served, for ever."""
    keys_actor: str | None = None
    """None: only `api_keys` count, and tokens are charged to nobody's share."""

    batches_actor: str | None = None
    """None: no files are kept, and no batches are run."""
    batches: BatchSettings = BatchSettings()

    api_keys: tuple[SecretStr, ...] = ()

    cors_origins: tuple[str, ...] = ()
    """Origins of web pages whose scripts may call this service; "*" is any."""
    greedy_temperature: float | None = Field(None, ge=LEAST_TEMPERATURE, le=2)
    ignore_seed: bool = False

    max_body_bytes: PositiveInt = 1 << 20
    max_n: PositiveInt = 8
    max_prompts: PositiveInt = 16
    max_tokens: PositiveInt = 2048
    default_max_tokens: PositiveInt = 16
    default_chat_max_tokens: PositiveInt = 256

    heartbeat_s: PositiveFloat = 10.0
    """A stream on which nothing was written for this long gets a comment."""
    health_timeout_s: PositiveFloat = 5.0
    statement_timeout_s: PositiveFloat = 30.0
    write_interval_s: float = Field(0.01, ge=0)
    """Tokens of one stream that come within this time of its last write leave in one write."""

    @property
    def nearest(self) -> Nearest:
        """What is done where a client asks for what cannot be private."""
        return Nearest(self.greedy_temperature, self.ignore_seed)

    @field_validator("api_keys")
    @classmethod
    def _keys_are_not_empty(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if any(not key.get_secret_value() for key in keys):
            raise ValueError("one key is empty; remove it, or give it a value")
        return keys
