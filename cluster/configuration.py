"""One YAML file and the environment, typed and checked: everything that a deployment is made of.

A key of the file, `privacy.epsilon` say, is the environment's `PRIVMIX_PRIVACY__EPSILON`; the environment wins.
Relative paths in the file are relative to the file.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeVar, Union

import yaml
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    ValidationError,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from services.alerts.settings import AlertSettings
from services.batches.settings import BatchSettings
from services.engine import known_engine
from services.gateway.settings import ClientSettings
from services.privacy.protocols import DEFAULT, PROTOCOLS, name_of
from services.privacy.settings import Settings

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""Of one of `ensembles`: a model name, and a part of its actors' namespace and of its shares."""

SECRET = ("alerts.webhooks", "alerts.secret", "http.api_keys")
"""Keys whose values no message shows."""


class ConfigurationError(Exception):
    """The configuration cannot be used; the message names the key and the fix."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


AnySection = TypeVar("AnySection", bound=Section)


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


class Http(Section, ClientSettings):
    host: str = "127.0.0.1"
    port: int = Field(8000, gt=0, lt=65536)
    replicas: int = Field(1, gt=0)
    served_model_names: tuple[str, ...] = Field(("privmix",), min_length=1)
    anonymous: bool = Field(False, description="serve other machines although there are no keys")


class Keys(Section):
    """Where the keys of clients are kept, and their shares of the budget."""

    database: str | None = Field(
        None, description="a SQLite file or a database URL; None: beside the ledger, in `keys.db` or in its database"
    )


class Named(Section):
    """One of `ensembles`. What a section leaves out is as in the section of that name at the top level.

    `privacy` is taken whole, because what one protocol is told means nothing to another.
    """

    model_config = ConfigDict(protected_namespaces=())

    ensemble: Path
    model: str | None = None
    privacy: Privacy | None = None
    budget: Budget = Budget()
    engine: Engine = Engine()
    shards: Shards = Shards()
    coordinator: Coordinator = Coordinator()


@dataclass(frozen=True)
class EnsembleConfiguration:
    """All that concerns one ensemble.

    Attributes:
        names: the model names that clients use; the first is the ensemble's own.
        namespace: Ray's, of its actors.
        own_shares: whether keys can have shares of this ensemble alone.
    """

    names: tuple[str, ...]
    namespace: str
    own_shares: bool
    ensemble: Path
    model: str | None
    privacy: Settings
    budget: Budget
    engine: Engine
    shards: Shards
    coordinator: Coordinator

    @property
    def name(self) -> str:
        return self.names[0]


class Configuration(BaseSettings):
    """The whole deployment. `Configuration.load(path)` reads a file; unknown keys are refused by name.

    A deployment has the ensemble that its top level names, or several under `ensembles`, each with a name, or both.
    """

    model_config = SettingsConfigDict(
        env_prefix="PRIVMIX_", env_nested_delimiter="__", extra="forbid", frozen=True, protected_namespaces=()
    )

    ensemble: Path | None = None
    ensembles: dict[Annotated[str, StringConstraints(pattern=NAME)], Named] = {}
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

    @property
    def served(self) -> tuple[EnsembleConfiguration, ...]:
        """Every ensemble, that of the top level first."""
        first = [] if self.ensemble is None else [self._top(self.ensemble)]
        return (*first, *(self._named(name, named) for name, named in self.ensembles.items()))

    def choose(self, name: str | None = None) -> EnsembleConfiguration:
        """The ensemble of a model name; without one, the only ensemble that there is.

        Raises:
            ConfigurationError: there is none of this name; or no name is given, and there are several.
        """
        names = ", ".join(each.name for each in self.served)
        if name is None:
            if len(self.served) > 1:
                raise ConfigurationError(f"--ensemble: there are several; name one of {names}")
            return self.served[0]
        for each in self.served:
            if name in each.names:
                return each
        raise ConfigurationError(f"ensembles.{name}: there is no such ensemble; there are: {names}")

    def _top(self, ensemble: Path) -> EnsembleConfiguration:
        return EnsembleConfiguration(
            names=self.http.served_model_names,
            namespace=self.namespace,
            own_shares=False,
            ensemble=ensemble,
            model=self.model,
            privacy=self.privacy,
            budget=self.budget,
            engine=self.engine,
            shards=self.shards,
            coordinator=self.coordinator,
        )

    def _named(self, name: str, named: Named) -> EnsembleConfiguration:
        return EnsembleConfiguration(
            names=(name,),
            namespace=f"{self.namespace}.{name}",
            own_shares=True,
            ensemble=named.ensemble,
            model=named.model,
            privacy=named.privacy or self.privacy,
            budget=_over(self.budget, named.budget).model_copy(
                update={"ledger": named.budget.ledger, "ledger_id": named.budget.ledger_id}
            ),
            engine=_over(self.engine, named.engine),
            shards=_over(self.shards, named.shards),
            coordinator=_over(self.coordinator, named.coordinator),
        )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not self.served:
            raise ValueError("ensemble: is missing; add it, or several under `ensembles`")
        if self.ensemble is None and "served_model_names" in self.http.model_fields_set:
            raise ValueError(
                "http.served_model_names: are the names of the ensemble at the top level, and there is none; the names "
                "under `ensembles` are model names"
            )
        for each in self.served:
            where = f"ensembles.{each.name}.engine" if each.own_shares else "engine"
            if self.http.max_tokens >= each.engine.context_length:
                raise ValueError(
                    f"http.max_tokens ({self.http.max_tokens}) leaves no room for a prompt in {where}.context_length "
                    f"({each.engine.context_length}): lower the one or raise the other"
                )
        return self

    def _from_folder(self, folder: Path) -> Self:
        keys = self.keys.database
        located = self.model_copy(
            update={
                "ensemble": None if self.ensemble is None else (folder / self.ensemble).absolute(),
                "ensembles": {name: _located(name, named, folder) for name, named in self.ensembles.items()},
                "model": _model_path(self.model, folder),
                "budget": _at(self.budget.ledger, self.budget, folder),
                "keys": self.keys.model_copy(update={"database": None if keys is None else _place(keys, folder)}),
            }
        )
        located._check_apart()
        return located

    def _check_apart(self) -> None:
        """
        Raises:
            ConfigurationError: two ensembles have a name, a directory or a ledger in common.
        """
        seen: dict[str, set[object]] = {"name": set(), "ensemble": set(), "budget.ledger": set()}
        for each in self.served:
            has: dict[str, set[object]] = {
                "name": set(each.names),
                "ensemble": {each.ensemble},
                "budget.ledger": {each.budget.ledger},
            }
            for what, values in has.items():
                if not seen[what].isdisjoint(values):
                    raise ConfigurationError(
                        f"ensembles.{each.name}: has the {what} of another ensemble; each has a name, a directory and "
                        "a ledger of its own"
                    )
                seen[what] |= values


def _over(base: AnySection, own: AnySection) -> AnySection:
    """A section of one ensemble: what it leaves out is as at the top level."""
    return base.model_copy(update={name: getattr(own, name) for name in own.model_fields_set})


def _located(name: str, named: Named, folder: Path) -> Named:
    """One of `ensembles`, with paths that do not depend on where it is read; its own ledger by default."""
    ledger = named.budget.ledger if "ledger" in named.budget.model_fields_set else f"{name}.ledger.db"
    paths = {
        "ensemble": (folder / named.ensemble).absolute(),
        "model": _model_path(named.model, folder),
        "budget": _at(ledger, named.budget, folder),
    }
    return named.model_copy(update=paths)


def _at(ledger: str, budget: Budget, folder: Path) -> Budget:
    return budget.model_copy(update={"ledger": _place(ledger, folder)})


def _place(place: str, folder: Path) -> str:
    return place if "://" in place else str((folder / place).absolute())


def _model_path(model: str | None, folder: Path) -> str | None:
    return str((folder / model).absolute()) if model and (folder / model).is_dir() else model


_PROTOCOL_TAGS = {("privacy", name) for name in PROTOCOLS}


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
    keys = [str(each) for each in error["loc"]] or ["configuration"]
    # Pydantic names the protocol before its key.
    key = ".".join(
        each for before, each in zip(["", *keys], keys, strict=False) if (before, each) not in _PROTOCOL_TAGS
    )
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
