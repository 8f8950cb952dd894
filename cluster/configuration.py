"""One YAML file and the environment, typed and checked: everything that a deployment is made of.

A key of the file, `privacy.epsilon` say, is the environment's `PRIVMIX_PRIVACY__EPSILON`; the environment wins.
Relative paths in the file are relative to the file.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, Union

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    SecretStr,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from services.alerts.settings import AlertSettings
from services.batches.settings import BatchSettings
from services.engine import known_engine
from services.gateway.fields import LEAST_TEMPERATURE
from services.privacy.protocols import DEFAULT, PROTOCOLS, name_of
from services.privacy.settings import Settings

SECRET = ("alerts.webhooks", "alerts.secret", "http.api_keys")
"""Keys whose values no message shows."""


class ConfigurationError(Exception):
    """The configuration cannot be used; the message names the key and the fix."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


if TYPE_CHECKING:
    Privacy = Settings
else:
    # What is promised, and by which protocol; each protocol has keys of its own.
    Privacy = Annotated[
        Union[tuple(Annotated[settings, Tag(name)] for name, settings in PROTOCOLS.items())],  # noqa: UP007
        Discriminator(
            name_of,
            custom_error_type="protocol",
            custom_error_message=f"there is no such protocol; there are {', '.join(PROTOCOLS)}",
        ),
    ]


class Budget(Section):
    """`ledger` is a SQLite file or a database URL; a lease is what one coordinator may lose when it is killed."""

    ledger: str = "ledger.db"
    ledger_id: str | None = Field(
        None, min_length=1, description="None: as the receipt in the ensemble's directory says"
    )
    create: bool = Field(True, description="let `privmix serve` begin the ledger of an ensemble that never had one")
    lease_tokens: int = Field(32, gt=0)
    when_exhausted: Literal["refuse", "public"] | None = Field(None, description="None: as the protocol has it")


class Engine(Section):
    kind: Annotated[str, AfterValidator(known_engine)] = "vllm"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    context_length: int = Field(2048, gt=1)
    cache_gib: float = Field(2.0, gt=0)
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="the share of a GPU's memory for engines, which is divided among those that share it",
    )
    batch_invariant: bool = Field(
        True, description="on a GPU, a row has the same bits whatever else is computed beside it"
    )


class Shards(Section):
    """How the ensemble is spread. `num_gpus` and `num_cpus` are what Ray reserves for each copy of a shard."""

    parts_per_shard: int = Field(1024, gt=0, description="parts that one shard holds; more parts make more shards")
    count: Annotated[int, Field(gt=0)] | Literal["auto"] | None = Field(
        None, description="None: as many as all parts need; auto: from one on, as many as there is room for"
    )
    copies: int = Field(1, gt=0, description="actors that share the work of one shard; more throughput, the same N")
    num_gpus: float | None = Field(None, ge=0, description="None: 1 where the cluster has GPUs, else 0")
    num_cpus: float = Field(1.0, ge=0)
    threads: int | None = Field(None, gt=0, description="None: every core of the machine, where there is no GPU")
    start_timeout_s: float = Field(900.0, gt=0, description="for a shard to answer; waiting for a new node included")


class Coordinator(Section):
    replicas: int = Field(1, gt=0, description="coordinators, which share the load and one budget")
    num_gpus: float = Field(0.0, ge=0, description="what Ray reserves for the mathematics of a step; 0: on the CPU")
    num_cpus: float = Field(0.0, ge=0, description="what Ray reserves for each of them")
    memory_gib: float = Field(0.0, ge=0, description="what Ray reserves for each of them")
    max_live: int = Field(64, gt=0)
    max_waiting: int = Field(256, ge=0)
    max_rows: int = Field(2048, gt=0, description="next-token distributions that a step holds at most")
    prefill_tokens: int = Field(4096, gt=0, description="tokens of new contexts that a step ingests at most")
    step_timeout_s: float = Field(60.0, gt=0, description="a shard without an answer for this long is replaced")
    recovery_s: float = Field(90.0, ge=0, description="how long streams wait for what was lost, before they fail")
    patience_s: float = Field(5.0, gt=0, description="how long one of several copies is waited for alone")
    pace_s: float = Field(0.0, ge=0)


class Http(Section):
    host: str = "127.0.0.1"
    port: int = Field(8000, gt=0, lt=65536)
    replicas: int = Field(1, gt=0)
    served_model_names: tuple[str, ...] = Field(("privmix",), min_length=1)
    api_keys: tuple[SecretStr, ...] = ()
    anonymous: bool = Field(False, description="serve other machines although there are no keys")
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


class Keys(Section):
    """Where the keys of clients are kept, and their shares of the budget."""

    database: str | None = Field(
        None, description="a SQLite file or a database URL; None: beside the ledger, in `keys.db` or in its database"
    )


class Configuration(BaseSettings):
    """The whole deployment. `Configuration.load(path)` reads a file; unknown keys are refused by name."""

    model_config = SettingsConfigDict(
        env_prefix="PRIVMIX_", env_nested_delimiter="__", extra="forbid", frozen=True, protected_namespaces=()
    )

    ensemble: Path
    model: str | None = Field(None, description="None: the base model that the ensemble's manifest names")
    namespace: str = Field("privmix", min_length=1)
    privacy: Privacy = PROTOCOLS[DEFAULT]()  # type: ignore[call-arg]
    budget: Budget = Budget()
    engine: Engine = Engine()
    shards: Shards = Shards()
    coordinator: Coordinator = Coordinator()
    keys: Keys = Keys()
    alerts: AlertSettings = AlertSettings()
    batches: BatchSettings = BatchSettings()
    http: Http = Http()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return env_settings, init_settings

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a YAML file, and the environment over it.

        Raises:
            ConfigurationError: no such file, not YAML, an unknown key, or an impossible value; names the key.
        """
        return cls.of(_read(path), path.parent)

    @classmethod
    def of(cls, values: dict[str, Any], folder: Path | None = None) -> Self:
        """From plain values, and the environment over them; relative paths are taken from `folder`."""
        try:
            configuration = cls(**values)
        except ValidationError as error:
            raise ConfigurationError("\n".join(map(_explain, error.errors()))) from error
        return configuration._from_folder(folder or Path())

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.http.max_tokens >= self.engine.context_length:
            raise ValueError(
                f"http.max_tokens ({self.http.max_tokens}) leaves no room for a prompt in engine.context_length "
                f"({self.engine.context_length}): lower the one or raise the other"
            )
        return self

    def _from_folder(self, folder: Path) -> Self:
        ledger = self.budget.ledger
        located = ledger if "://" in ledger else str((folder / ledger).absolute())
        keys = self.keys.database
        if keys is not None and "://" not in keys:
            keys = str((folder / keys).absolute())
        model = str((folder / self.model).absolute()) if self.model and (folder / self.model).is_dir() else self.model
        return self.model_copy(
            update={
                "ensemble": (folder / self.ensemble).absolute(),
                "model": model,
                "budget": self.budget.model_copy(update={"ledger": located}),
                "keys": self.keys.model_copy(update={"database": keys}),
            }
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path}: is not YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path}: must hold keys and values, such as `ensemble: ./ensemble`")
    return values


def _explain(error: Any) -> str:
    section, *keys = (*error["loc"], "configuration") if not error["loc"] else error["loc"]
    if section == "privacy" and keys[:1] and keys[0] in PROTOCOLS:  # pydantic names the protocol before its key
        keys = keys[1:]
    key = ".".join(map(str, (section, *keys)))
    match error["type"]:
        case "protocol":
            return f"{key}.protocol: {error['msg']}, got {name_of(error['input'])!r}"
        case "extra_forbidden":
            return f"{key}: there is no such key; remove it or correct its name"
        case "missing":
            return f"{key}: is missing; add it"
        case _ if key.startswith(SECRET):
            return f"{key}: {error['msg']}"
        case _:
            return f"{key}: {error['msg']}, got {error['input']!r}" if error["loc"] else str(error["msg"])
