"""Defines the settings with which requests are checked and answered. They are validated on construction."""

import secrets
from pathlib import Path

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
)

from privmix.keys.messages import AdmissionLimits

# At lower temperatures, distributions collapse to one token and scaled logits overflow in float32.
LEAST_TEMPERATURE = 0.01


class ClientSettings(BaseModel):
    """Holds the operator's settings for clients. The section `http` of the configuration has the same fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    cors_origins: tuple[str, ...] = Field(
        (), description='origins of web pages that may call the service; ["*"] allows all'
    )
    allowed_hosts: tuple[str, ...] = Field(
        (),
        description="names of the service, besides localhost and addresses, to which it answers while it has no keys; "
        '["*"] allows all',
    )
    greedy_temperature: float | None = Field(
        None, ge=LEAST_TEMPERATURE, le=2, description="the temperature for greedy requests; if None, they are refused"
    )
    ignore_seed: bool = Field(False, description="accept a seed without effect")
    max_body_bytes: int = Field(1 << 20, gt=0)
    max_n: int = Field(8, gt=0)
    max_prompts: int = Field(64, gt=0)
    max_tokens: int = Field(1024, gt=0)


class ServedEnsemble(BaseModel):
    """Describes the ensemble of a service to its gateways.

    Attributes:
        names: the model names that clients use; answers and metrics have the first.
        namespace: the Ray namespace of its actors.
        model: a Hugging Face model directory, read for its tokenizer only.
        context_length: the context length of its engines in tokens.
        coordinators: the Ray names of its coordinators. Its other actors have one name in each namespace.
        capacity: the number of generations that its coordinators run at the same time.
        max_waiting: the number of further generations that may wait.
        recovery_s: how long a request without a coordinator waits for one before it fails.
        stall_timeout_s: how long a request waits for its next token, including failures and recoveries.
        private_base: whether its base model was trained on private text, which answers are labelled with.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    names: tuple[str, ...] = Field(min_length=1)
    namespace: str
    model: Path
    context_length: PositiveInt
    coordinators: tuple[str, ...]
    capacity: PositiveInt
    max_waiting: NonNegativeInt
    recovery_s: NonNegativeFloat
    stall_timeout_s: PositiveFloat
    private_base: bool = False

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def admission_limits(self) -> AdmissionLimits:
        return AdmissionLimits(self.capacity, self.max_waiting)


class RequestSettings(ClientSettings):
    """Holds the settings of one gateway replica.

    Attributes:
        api_key_hashes: the hashes (`Secret.hash`) of the keys in the configuration. A gateway does not get the keys.
        keys_actor: if None, only the keys in the configuration are valid and no shares are charged.
        cache_secret: the key of the hash that separates the prefix caches of API keys. A service's gateways share it.
    """

    ensemble: ServedEnsemble
    api_key_hashes: tuple[str, ...] = ()
    keys_actor: str | None = None
    cache_secret: SecretStr = Field(default_factory=lambda: SecretStr(secrets.token_hex(32)))
