"""Reads and validates the configuration of a deployment from a YAML file and the environment.

A variable such as `PRIVMIX_PRIVACY__EPSILON` overrides the key `privacy.epsilon` of the file. Secrets can be in files
of their own (`privmix_cluster.secret_files`). Relative paths in the file are relative to the file.
"""

import os
from collections.abc import Hashable, Iterator, Mapping
from difflib import get_close_matches
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
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)
from yaml.constructor import ConstructorError

from privmix.budget.signing import SigningKey
from privmix.coordinator.settings import LEASE_TOKENS, StepSettings
from privmix.database.database import url_of
from privmix.engine import known_engine
from privmix.engine.engine import EngineSettings
from privmix.fleet.plan import START_TIMEOUT_S
from privmix.foundation.errors import ConfigurationError, DatabaseError
from privmix.gateway.settings import ClientSettings
from privmix.privacy.protocols import DEFAULT, PROTOCOLS, name_of
from privmix.privacy.settings import Settings, WhenExhausted
from privmix_cluster.options import NAMESPACE
from privmix_cluster.secret_files import is_secret, read_files

_PREFIX = "PRIVMIX_"
OTHER_VARIABLES = ("PRIVMIX_CACHE", "PRIVMIX_API_KEY")
"""The variables with this prefix that are no settings of the configuration."""


class Section(BaseModel):
    """Is the base of all sections: immutable, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


if TYPE_CHECKING:
    Privacy = Settings
else:
    # The privacy budget and the protocol. Each protocol has its own keys, so its name selects the model.
    Privacy = Annotated[
        Union[tuple(Annotated[settings, Tag(name)] for name, settings in PROTOCOLS.items())],  # noqa: UP007
        Discriminator(
            name_of,
            custom_error_type="protocol",
            custom_error_message=f"there is no such protocol; choose one of {', '.join(PROTOCOLS)}",
        ),
    ]


class BudgetSection(Section):
    """Configures the ledger of an ensemble."""

    ledger: str = Field("ledger.db", description="a SQLite file or a database URL")
    ledger_id: str | None = Field(
        None, min_length=1, description="None: the id in the receipt in the ensemble's directory"
    )
    anchor: str | None = Field(
        None,
        min_length=1,
        description="an existing directory that stores the end of the ledger's chain besides the receipt, on another "
        "volume than the ledger. A ledger that lost rows is refused. Needed where the ensemble's directory cannot be "
        "written",
    )
    signing_key: SecretStr | None = Field(
        None,
        description="a secret of 32 characters or more that signs the ledger's chain, so that a chain which somebody "
        "with access to the database rewrote is refused. Name its file, not where the ledger is, in `signing_key_file`",
    )
    create: bool = Field(True, description="let `privmix serve` create the ledger of an ensemble that never had one")
    lease_tokens: int = Field(
        LEASE_TOKENS,
        gt=0,
        description="tokens that a coordinator reserves at a time; a killed coordinator can lose two leases",
    )
    when_exhausted: WhenExhausted | None = Field(
        None, description="None: base on a private base, else the protocol's default"
    )

    def key(self) -> SigningKey | None:
        """Returns the key that signs the ledger's chain; None without one.

        Raises:
            InputError: the key is too short.
        """
        return SigningKey.of(None if self.signing_key is None else self.signing_key.get_secret_value())


class EngineSection(Section):
    """Configures the inference engine of the shards."""

    kind: Annotated[str, AfterValidator(known_engine)] = EngineSettings.kind
    dtype: Literal["bfloat16", "float16", "float32"] = EngineSettings.dtype
    head_dtype: Literal["auto", "model", "float32"] = Field(
        EngineSettings.head_dtype,
        description="the type of logits: float32 halves the rounding of ratios of rows, and model is dtype; auto: "
        "float32 on a GPU, where it costs nothing, without batch_invariant",
    )
    context_length: int = Field(EngineSettings.context_length, gt=1)
    cache_gib: float = Field(EngineSettings.cache_gib, gt=0)
    gpu_memory_utilization: float = Field(
        EngineSettings.gpu_memory_utilization,
        gt=0,
        le=1,
        description="the share of a GPU's memory for engines; engines on the same GPU divide it",
    )
    batch_invariant: bool = Field(
        False, description="on a GPU, a row has the same bits in batches of some 40 sequences or fewer; much slower"
    )


class ShardsSection(Section):
    """Configures how the parts of an ensemble are distributed over actors."""

    parts_per_shard: int = Field(1024, gt=0, description="the maximum number of parts of a shard")
    count: Annotated[int, Field(gt=0)] | Literal["auto"] | None = Field(
        None,
        description="the number of shards at the start; None: enough for all parts; auto: one, then more as the "
        "cluster has room",
    )
    copies: int = Field(
        1, gt=0, description="the number of actors that share the work of one shard; more throughput, the same N"
    )
    num_gpus: float | None = Field(
        None,
        ge=0,
        description="GPUs that Ray reserves for each copy; a whole number above 1 splits the model over GPUs of one "
        "node (tensor parallelism); None: 1 if the cluster has GPUs, else 0",
    )
    num_cpus: float = Field(1.0, ge=0, description="CPUs that Ray reserves for each copy")
    threads: int | None = Field(
        None, gt=0, description="threads of a shard on a CPU; None: as many as this process may use"
    )
    start_timeout_s: float = Field(
        START_TIMEOUT_S, gt=0, description="the time for a shard to start, including the wait for a new node"
    )


class CoordinatorSection(Section):
    """Configures the coordinators, which generate the tokens of an ensemble."""

    replicas: int = Field(1, gt=0, description="the number of coordinators, which share the load and one budget")
    num_gpus: float = Field(
        0.0, ge=0, description="GPUs that Ray reserves for the arithmetic of a step; 0: it runs on the CPU"
    )
    num_cpus: float = Field(0.0, ge=0, description="CPUs that Ray reserves for each coordinator")
    memory_gib: float = Field(0.0, ge=0, description="memory that Ray reserves for each coordinator")
    max_live: int = Field(StepSettings.max_live, gt=0, description="the maximum number of sequences in a step")
    max_waiting: int = Field(
        StepSettings.max_waiting, ge=0, description="the maximum number of waiting sequences; more are refused (429)"
    )
    step_timeout_s: float = Field(
        StepSettings.step_timeout_s, gt=0, description="a shard that does not answer within this time is replaced"
    )
    recovery_s: float = Field(
        StepSettings.recovery_s, ge=0, description="how long streams wait for a lost actor before they fail"
    )
    patience_s: float = Field(
        StepSettings.patience_s, gt=0, description="after this time, another copy helps a slow copy of a shard"
    )
    pace_s: float = Field(
        StepSettings.pace_s,
        ge=0,
        description="the minimum time from the start of a step to its tokens; hides differences in time",
    )


class HttpSection(Section, ClientSettings):
    """Configures the HTTP route and its gateways."""

    host: str = "127.0.0.1"
    port: int = Field(8000, gt=0, lt=65536)
    replicas: int = Field(1, gt=0, description="the number of gateways")
    api_keys: tuple[SecretStr, ...] = Field((), description="API keys; without any key, every client has access")
    served_model_names: tuple[str, ...] = Field(("privmix",), min_length=1)
    anonymous: bool = Field(False, description="serve other machines although there are no keys")

    @field_validator("api_keys")
    @classmethod
    def _keys_are_not_empty(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if any(not key.get_secret_value() for key in keys):
            raise ValueError("one key is empty; remove it or give it a value")
        return keys


class KeysSection(Section):
    """Configures the database of the clients' keys and their shares of the budget."""

    database: str | None = Field(
        None,
        description="a SQLite file or a database URL; None: `keys.db` beside the ledger, or the ledger's own database",
    )


class Configuration(BaseSettings):
    """Holds the configuration of a deployment, which serves one ensemble. `load` reads it from a file."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True, protected_namespaces=()
    )

    ensemble: Path
    model: str | None = Field(None, description="the base model; None: the one that the ensemble's manifest names")
    namespace: str = Field(NAMESPACE, min_length=1)
    privacy: Privacy = PROTOCOLS[DEFAULT]()  # type: ignore[call-arg]
    budget: BudgetSection = BudgetSection()
    engine: EngineSection = EngineSection()
    shards: ShardsSection = ShardsSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    keys: KeysSection = KeysSection()
    http: HttpSection = HttpSection()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)  # `of` reads the environment, because a variable may name a file

    @classmethod
    def load(cls, path: Path) -> Self:
        """Reads a YAML file; variables of the environment override its keys.

        Raises:
            ConfigurationError: the file cannot be read or is not YAML, or a key is unknown or has an invalid value.
        """
        return cls.of(read_yaml(path), path.parent)

    @classmethod
    def of(cls, values: dict[str, Any], folder: Path | None = None) -> Self:
        """Validates plain values; variables of the environment override them. Relative paths start at `folder`.

        Raises:
            ConfigurationError: a key is unknown or has an invalid value.
        """
        folder = folder or Path()
        _check_variables()
        try:
            variables = EnvSettingsSource(cls)()
        except SettingsError as error:  # its cause shows the value
            raise ConfigurationError(f"the environment: {error}; write a list or a section as JSON") from None
        try:
            configuration = cls(**_overridden(read_files(values, folder), read_files(variables, folder)))
        except ValidationError as error:
            raise ConfigurationError("\n".join(map(_explain, error.errors()))) from error
        return configuration._from_folder(folder)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.http.max_tokens >= self.engine.context_length:
            raise ValueError(
                f"http.max_tokens ({self.http.max_tokens}) leaves no room for a prompt in engine.context_length "
                f"({self.engine.context_length}): lower http.max_tokens or raise engine.context_length"
            )
        return self

    def _from_folder(self, folder: Path) -> Self:
        keys, budget = self.keys.database, self.budget
        ledger = _database("budget.ledger", budget.ledger, folder)
        anchor = budget.anchor and str((folder / budget.anchor).absolute())
        return self.model_copy(
            update={
                "ensemble": (folder / self.ensemble).absolute(),
                "model": _model_path(self.model, folder),
                "budget": budget.model_copy(update={"ledger": ledger, "anchor": anchor}),
                "keys": self.keys.model_copy(update={"database": keys and _database("keys.database", keys, folder)}),
            }
        )


def _overridden(values: Mapping[str, Any], variables: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values with those of variables in their places, section by section."""
    both = {
        name: _overridden(values[name], own)
        for name, own in variables.items()
        if isinstance(own, Mapping) and isinstance(values.get(name), Mapping)
    }
    return {**values, **variables, **both}


def _check_variables() -> None:
    """Checks that each variable with our prefix sets something: a misspelt one would leave a default in force.

    Raises:
        ConfigurationError: a variable sets nothing.
    """
    settings = {name.upper() for name in Configuration.model_fields}
    ours = {name.upper(): name for name in os.environ if name.upper().startswith(_PREFIX)}
    for name, given in ours.items():
        if name not in OTHER_VARIABLES and name.removeprefix(_PREFIX).partition("__")[0] not in settings:
            known = {variable.replace("__", "_"): variable for variable in _variables()}
            near = [known[key] for key in get_close_matches(name.replace("__", "_"), known, 1, 0.8)]
            raise ConfigurationError(
                f"the environment: {given} sets nothing; "
                + (f"write {near[0]}, or remove it" if near else "remove it, or correct its name")
            )


def _variables() -> Iterator[str]:
    """Yields the variable of each setting."""
    for name, field in Configuration.model_fields.items():
        models = PROTOCOLS.values() if name == "privacy" else (field.annotation,)
        keys = {key for model in models for key in getattr(model, "model_fields", {"": None})}
        yield from (f"{_PREFIX}{name}{'__' if key else ''}{key}".upper() for key in keys)


def _database(setting: str, place: str, folder: Path) -> str:
    """Returns a URL unchanged, or the absolute path of a SQLite file.

    Raises:
        ConfigurationError: the place is neither. The message does not show it, because it may have a password.
    """
    try:
        url_of(place)
    except DatabaseError as error:
        raise ConfigurationError(f"{setting}: {error}") from error
    return place if "://" in place else str((folder / place).absolute())


def _model_path(model: str | None, folder: Path) -> str | None:
    return str((folder / model).absolute()) if model and (folder / model).is_dir() else model


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, and one that YAML does not read as text, such as `on` or `2024`."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        names = set()
        for key, _ in node.value:
            if key.tag != "tag:yaml.org,2002:str":
                raise ConstructorError(problem=f"{key.value!r} is no key", problem_mark=key.start_mark)
            if key.value in names:
                raise ConstructorError(problem=f"the key {key.value} is there twice", problem_mark=key.start_mark)
            names.add(key.value)
        return super().construct_mapping(node, deep)


_PROTOCOL_TAGS = {("privacy", name) for name in PROTOCOLS}


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the keys and values of a YAML file.

    Raises:
        ConfigurationError: the file cannot be read, is not YAML, or holds something else.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _Loader)  # a `SafeLoader`
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:  # its text quotes the line, which may hold a secret
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigurationError(f"{path}, line {line}: {error.problem}; correct the line") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{path}: is not YAML: write it as UTF-8 text") from error
    if not isinstance(values, dict):
        raise ConfigurationError(f"{path}: must hold keys and values, such as `name: value`")
    return values


def _explain(error: Any) -> str:
    keys = [str(key) for key in error["loc"]] or ["configuration"]
    # Pydantic inserts the protocol's name as a tag after `privacy`, which is not a key of the file.
    key = ".".join(key for before, key in zip(["", *keys], keys, strict=False) if (before, key) not in _PROTOCOL_TAGS)
    match error["type"]:
        case "protocol":
            return f"{key}.protocol: {error['msg']}, got {name_of(error['input'])!r}"
        case "extra_forbidden":
            return f"{key}: there is no such key; remove it or correct its name"
        case "missing":
            return f"{key}: is missing; add it"
        case _ if is_secret(key):
            return f"{key}: {error['msg']}"
        case _:
            return f"{key}: {error['msg']}, got {error['input']!r}" if error["loc"] else str(error["msg"])
