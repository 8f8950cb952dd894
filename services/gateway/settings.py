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


class ClientSettings(BaseModel):
    """What an operator chooses for clients; the section `http` of the configuration has the same fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    api_keys: tuple[SecretStr, ...] = Field((), description="empty: every client is let in")
    cors_origins: tuple[str, ...] = Field((), description='web pages that may call the service; ["*"]: all')
    greedy_temperature: float | None = Field(
        None, ge=LEAST_TEMPERATURE, le=2, description="None: greedy requests are refused; else sampled at this"
    )
    ignore_seed: bool = Field(False, description="accept a seed, which has no effect")
    heartbeat_s: float = Field(10.0, gt=0, description="a stream that waits longer gets a comment")
    max_body_bytes: int = Field(1 << 20, gt=0)
    max_n: int = Field(8, gt=0)
    max_prompts: int = Field(16, gt=0)
    max_tokens: int = Field(1024, gt=0)

    @property
    def nearest(self) -> Nearest:
        """What is done if a client requests what cannot be private."""
        return Nearest(self.greedy_temperature, self.ignore_seed)

    @field_validator("api_keys")
    @classmethod
    def _keys_are_not_empty(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if any(not key.get_secret_value() for key in keys):
            raise ValueError("one key is empty; remove it, or give it a value")
        return keys


class GatewaySettings(ClientSettings):
    """Settings of one gateway replica.

    The default lengths of an answer give way to `max_tokens` and to the context of the model.
    """

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

    default_max_tokens: PositiveInt = 16
    default_chat_max_tokens: PositiveInt = 256

    health_timeout_s: PositiveFloat = 5.0
    statement_timeout_s: PositiveFloat = 30.0
    write_interval_s: float = Field(0.01, ge=0)
    """Tokens of one stream that come within this time of its last write leave in one write."""
