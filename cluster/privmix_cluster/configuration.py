"""Reads and validates the configuration of a deployment from a YAML file and the environment.

A variable such as `PRIVMIX_PRIVACY__EPSILON` overrides the key `privacy.epsilon` of the file. Secrets can be in files
of their own (`privmix_cluster.secret_files`). Relative paths in the file are relative to the file. The comments of
`cluster/privmix.yaml` say what each key means.
"""

import json
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

    ledger: str = Field("ledger.db", min_length=1)
    anchor: str | None = Field(None, min_length=1)
    signing_key: SecretStr | None = None
    create: bool = True
    lease_tokens: int = Field(LEASE_TOKENS, gt=0)
    when_exhausted: WhenExhausted | None = None

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
    context_length: int = Field(EngineSettings.context_length, gt=1)
    cache_gib: float = Field(EngineSettings.cache_gib, gt=0)
    gpu_memory_utilization: float = Field(EngineSettings.gpu_memory_utilization, gt=0, le=1)


class ShardsSection(Section):
    """Configures how the parts of an ensemble are distributed over actors."""

    parts_per_shard: int = Field(1024, gt=0)
    count: int | None = Field(None, gt=0)
    copies: int = Field(1, gt=0)
    num_gpus: float | None = Field(None, ge=0)
    num_cpus: float = Field(1.0, ge=0)
    threads: int | None = Field(None, gt=0)
    start_timeout_s: float = Field(START_TIMEOUT_S, gt=0)


class CoordinatorSection(Section):
    """Configures the coordinators, which generate the tokens of an ensemble."""

    replicas: int = Field(1, gt=0)
    num_gpus: float = Field(0.0, ge=0)
    num_cpus: float = Field(0.0, ge=0)
    memory_gib: float = Field(0.0, ge=0)
    max_live: int = Field(StepSettings.max_live, gt=0)
    max_waiting: int = Field(StepSettings.max_waiting, ge=0)
    step_timeout_s: float = Field(StepSettings.step_timeout_s, gt=0)
    recovery_s: float = Field(StepSettings.recovery_s, ge=0)
    patience_s: float = Field(StepSettings.patience_s, gt=0)
    pace_s: float = Field(StepSettings.pace_s, ge=0)


class HttpSection(Section, ClientSettings):
    """Configures the HTTP route and its gateways."""

    host: str = "127.0.0.1"
    port: int = Field(8000, gt=0, lt=65536)
    replicas: int = Field(1, gt=0)
    api_keys: tuple[SecretStr, ...] = ()
    served_model_names: tuple[str, ...] = Field(("privmix",), min_length=1)
    anonymous: bool = False

    @field_validator("host")
    @classmethod
    def _host_is_no_wildcard_of_ipv6(cls, host: str) -> str:
        if host == "::":
            raise ValueError("Ray Serve would listen on IPv4 alone; use 0.0.0.0 or one address")
        return host

    @field_validator("api_keys")
    @classmethod
    def _keys_are_not_empty(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        if any(not key.get_secret_value() for key in keys):
            raise ValueError("one key is empty; remove it or give it a value")
        return keys


class KeysSection(Section):
    """Configures the database of the clients' keys and their shares of the budget."""

    database: str | None = Field(None, min_length=1)


class Configuration(Section):
    """Holds the configuration of a deployment, which serves one ensemble. `load` reads it from a file."""

    ensemble: Path
    model: str | None = None
    namespace: str = Field(NAMESPACE, min_length=1)
    privacy: Privacy = PROTOCOLS[DEFAULT]()  # type: ignore[call-arg]
    budget: BudgetSection = BudgetSection()
    engine: EngineSection = EngineSection()
    shards: ShardsSection = ShardsSection()
    coordinator: CoordinatorSection = CoordinatorSection()
    keys: KeysSection = KeysSection()
    http: HttpSection = HttpSection()

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
        try:
            configuration = cls(**_overridden(read_files(values, folder), read_files(_variables(), folder)))
        except ValidationError as error:  # it shows values
            raise ConfigurationError("\n".join(map(_explain, error.errors()))) from None
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
        keys, budget, model = self.keys.database, self.budget, self.model
        ledger = _database("budget.ledger", budget.ledger, folder)
        anchor = budget.anchor and str((folder / budget.anchor).absolute())
        return self.model_copy(
            update={
                "ensemble": (folder / self.ensemble).absolute(),
                "model": str((folder / model).absolute()) if model and (folder / model).is_dir() else model,
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


def _variables() -> dict[str, Any]:
    """Returns the values that variables of the environment give, by key and section.

    Raises:
        ConfigurationError: a variable with our prefix sets nothing. Ignored, it would leave a default in force.
    """
    values: dict[str, Any] = {}
    # Sorted, a section comes before its keys, which override it in any order of the environment.
    for name, text in sorted(os.environ.items(), key=lambda variable: variable[0].upper()):
        if not name.upper().startswith(_PREFIX) or name in OTHER_VARIABLES:
            continue
        keys = name[len(_PREFIX) :].lower().split("__")
        if keys[0] not in Configuration.model_fields:
            known = {each.replace("__", "_"): each for each in _variable_names()}
            near = get_close_matches(name.upper().replace("__", "_"), known, 1, 0.8)
            advice = f"write {known[near[0]]}, or remove it" if near else "remove it, or correct its name"
            raise ConfigurationError(f"the environment: {name} sets nothing; {advice}")
        value: Any = text
        if text.startswith(("[", "{")):
            try:
                value = json.loads(text)
            except ValueError:
                raise ConfigurationError(f"the environment: {name}: write a list or a section as JSON") from None
        for key in reversed(keys):
            value = {key: value}
        values = _overridden(values, value)
    return values


def _variable_names() -> Iterator[str]:
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
