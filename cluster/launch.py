"""The deployment, whole: from a configuration to actors that answer over HTTP, and down again."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.serve import Application
from ray.serve.config import HTTPOptions
from ray.serve.schema import LoggingConfig
from ray.util import list_named_actors

from cluster.configuration import Configuration, ConfigurationError
from cluster.promise import Promise, promise
from cluster.topology import plan_shards, shards_served
from services.alerts import actor as alerts
from services.alerts.actor import Watched
from services.batches import actor as batches
from services.budget import actor as budget
from services.budget.errors import LedgerError, LedgerMissing, LedgerUnknown
from services.budget.receipt import begin, is_fresh, known
from services.coordinator.coordinator import CoordinatorActor, CoordinatorSettings
from services.fleet import fleet
from services.fleet.fleet import FleetActor, FleetError, FleetSettings
from services.fleet.plan import ShardPlan
from services.fleet.shard_map import ShardMap
from services.gateway.deployment import Gateway
from services.gateway.settings import GatewaySettings
from services.keys import actor as keys
from services.keys.database import Database, beside
from services.keys.store import KeyStore
from services.training.manifest import Manifest
from services.training.public_model import resolve

APPLICATION = "privmix"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
CLOSING_S = 10.0

Report = Callable[[str], None]


@dataclass(frozen=True)
class Actors:
    """What answers behind the HTTP route; all of them detached and found by name. The fleet owns the shards."""

    promise: Promise
    model: Path
    fleet: ActorHandle
    coordinators: tuple[ActorHandle, ...]
    budget: ActorHandle
    keys: ActorHandle
    batches: ActorHandle | None
    alerts: ActorHandle | None

    def shard_map(self) -> ShardMap:
        """Who serves now."""
        shard_map: ShardMap = ray.get(self.fleet.shard_map.remote())
        return shard_map

    def close(self) -> None:
        """Give back what the coordinators hold of the budget, as far as they answer."""
        with suppress(RayError, TimeoutError):  # their leases then stay charged, which is the safe side
            ray.get([coordinator.close.remote() for coordinator in self.coordinators], timeout=CLOSING_S)
        with suppress(RayError, LedgerError, TimeoutError):  # another deployment then waits until it is silent
            ray.get(self.budget.release.remote(), timeout=CLOSING_S)

    def kill(self) -> None:
        for actor in filter(None, (self.alerts, self.batches)):  # first, as the others are not to be missed
            ray.kill(actor)
        for coordinator in self.coordinators:
            ray.kill(coordinator)
        with suppress(RayError, TimeoutError):
            ray.get(self.fleet.close.remote(), timeout=CLOSING_S)
        for actor in (self.fleet, self.budget, self.keys):
            ray.kill(actor)


@dataclass(frozen=True)
class Service:
    """What runs. `stop` gives unused budget back; whoever dies without it leaves the coordinator's lease spent."""

    url: str
    configuration: Configuration
    promise: Promise
    actors: Actors

    def stop(self) -> None:
        serve.delete(APPLICATION)
        self.actors.close()
        self.actors.kill()


def launch(configuration: Configuration, report: Report = lambda step: None) -> Service:
    """Start every actor and the HTTP route on the Ray cluster that this process is connected to.

    Args:
        report: is told each step, in words, before it begins.

    Raises:
        ManifestError, PublicModelError, LedgerError, ConfigurationError: what is wrong and how to mend it; nothing is
            left running.
    """
    checked = check_ensemble(configuration, report, may_begin=configuration.budget.create)
    check_keys(configuration, report)
    url = _listen(configuration)  # before anything is loaded: the port may be another's
    actors = start_actors(configuration, checked, report)
    report("Opening the HTTP route")
    try:
        serve.run(gateway(configuration, actors), name=APPLICATION, route_prefix="/")
    except BaseException:
        actors.kill()
        raise
    return Service(url, configuration, actors.promise, actors)


def check_keys(configuration: Configuration, report: Report = lambda step: None, *, listens: bool = True) -> None:
    """Whether clients must show a key; a service without any serves this machine alone, unless it is told otherwise.

    Args:
        listens: on `http.host`; else where Ray Serve was told to, which is not known here.

    Raises:
        ConfigurationError: other machines would be let in without a key.
        KeysError: the database of the keys cannot be opened.
    """
    http, database = configuration.http, Database(keys_database(configuration))
    if http.api_keys or KeyStore(database).required():
        return
    if listens and http.host not in LOOPBACK and not http.anonymous:
        raise ConfigurationError(
            f"http.host: {http.host} lets other machines in, and there are no keys. Make one "
            f"(privmix keys create NAME --database {database.name}), listen on 127.0.0.1, or set http.anonymous: true"
        )
    report("WARNING: there are no keys: everyone who reaches this service may spend its privacy budget")


def keys_database(configuration: Configuration) -> str:
    """Where keys are kept: a path or a URL."""
    return configuration.keys.database or beside(configuration.budget.ledger)


@dataclass(frozen=True)
class Checked:
    """An ensemble that is what its manifest says, and what its configuration promises of it."""

    manifest: Manifest
    model: Path
    promise: Promise
    ledger: str


def check_ensemble(
    configuration: Configuration, report: Report = lambda step: None, *, may_begin: bool = False
) -> Checked:
    """What can be known to fit before anything is started.

    Args:
        may_begin: begin the ledger of an ensemble that never had one.

    Raises:
        ManifestError, PublicModelError, LedgerError, ConfigurationError: what is wrong and how to mend it.
    """
    report("Checking the ensemble against its manifest")
    manifest = Manifest.load(configuration.ensemble)
    model = resolve(configuration.model or manifest.base_model)
    manifest.verify(configuration.ensemble, model)
    promised = promise(configuration, manifest)
    report(promised.sentence)
    return Checked(manifest, model, promised, _ledger_of(configuration, promised, report, may_begin))


def start_actors(
    configuration: Configuration, checked: Checked, report: Report = lambda step: None, *, keep: bool = False
) -> Actors:
    """Start what answers behind the HTTP route, and return once it can.

    Args:
        keep: take the actors that live already under these names for one's own, instead of refusing to start.

    Raises:
        LedgerError, ConfigurationError: what is wrong and how to mend it; nothing that was started is left running.
    """
    manifest, model, promised = checked.manifest, checked.model, checked.promise
    with _all_or_none(configuration.namespace):
        plans = plan_shards(
            configuration, manifest, model, ray.cluster_resources().get("GPU", 0), halves=promised.protocol.halves
        )
        serving = shards_served(configuration, manifest)
        report(f"Loading {promised.protocol.parts} parts into {serving} shard{'s' * (serving > 1)}")
        fleet_actor = _start_fleet(configuration, promised, plans, serving, keep)
        try:
            ray.get(fleet_actor.start.remote())
        except FleetError as error:
            raise ConfigurationError(f"shards: {getattr(error, 'cause', error)}") from error
        # A service that has the ledger goes on until this one makes its first charge.
        report("Opening the ledger")
        keeper = (keep and _kept_budget(configuration, promised)) or _start_budget(configuration, checked)
        keys_actor = keys.start(
            keys_database(configuration),
            capacity=_capacity(configuration),
            max_waiting=configuration.coordinator.max_waiting * configuration.coordinator.replicas,
            namespace=configuration.namespace,
            lifetime="detached",
            keep=keep,
        )
        names = coordinator_names(configuration)
        report(f"Starting the coordinator{'s' * (len(names) > 1)}")
        coordinators = tuple(_start_coordinator(configuration, promised, model, name, keep) for name in names)
        ray.get([coordinator.health.remote() for coordinator in coordinators])
        batches_actor = _start_batches(configuration, model, keep)
        alerts_actor = _start_alerts(configuration, keep)
    return Actors(promised, model, fleet_actor, coordinators, keeper, keys_actor, batches_actor, alerts_actor)


def coordinator_names(configuration: Configuration) -> tuple[str, ...]:
    """The names of the coordinators' actors."""
    return ("coordinator", *(f"coordinator-{number}" for number in range(1, configuration.coordinator.replicas)))


def gateway(configuration: Configuration, actors: Actors, beside: Application | None = None) -> Application:
    """The HTTP route as a Serve application, with another deployment beside it."""
    settings = gateway_settings(configuration, actors.model)
    route = Gateway.options(num_replicas=configuration.http.replicas)  # type: ignore[attr-defined]
    application: Application = route.bind(settings, beside)
    return application


def gateway_settings(configuration: Configuration, model: Path) -> GatewaySettings:
    """What the gateways, and the batches' actor like them, must be told."""
    return GatewaySettings(
        model=model,
        context_length=configuration.engine.context_length,
        namespace=configuration.namespace,
        coordinator_actors=coordinator_names(configuration),
        budget_actor=budget.NAME,
        fleet_actor=fleet.NAME,
        keys_actor=keys.NAME,
        recovery_s=configuration.coordinator.recovery_s,
        # A step can hang before it fails; then what it needs is waited for, and the first step after it can hang.
        stall_timeout_s=configuration.coordinator.recovery_s + 2 * configuration.coordinator.step_timeout_s,
        batches_actor=batches.NAME if configuration.batches.enabled else None,
        batches=configuration.batches,
        **configuration.http.model_dump(exclude={"host", "port", "replicas", "anonymous"}),
    )


@contextmanager
def _all_or_none(namespace: str) -> Iterator[None]:
    """What is started within is ended again when it fails; what lived before lives on."""
    before = _living(namespace)
    try:
        yield
    except BaseException:
        for name in _living(namespace) - before:
            with suppress(ValueError):  # it has ended by itself
                ray.kill(ray.get_actor(name, namespace))
        raise


def _living(namespace: str) -> set[str]:
    return {actor["name"] for actor in list_named_actors(all_namespaces=True) if actor["namespace"] == namespace}


def _kept_budget(configuration: Configuration, promised: Promise) -> ActorHandle | None:
    try:
        keeper = ray.get_actor(budget.NAME, configuration.namespace)
    except ValueError:
        return None
    if ray.get(keeper.ready.remote()) != promised.terms:
        raise ConfigurationError(
            f"namespace: {configuration.namespace} serves under another promise already; stop it, or take another name"
        )
    return keeper


def _ledger_of(configuration: Configuration, promised: Promise, report: Report, may_begin: bool) -> str:
    """The id of the ensemble's one ledger: a second one would forget what was spent."""
    settings, terms, ensemble = configuration.budget, promised.terms, configuration.ensemble
    try:
        if may_begin and settings.ledger_id is None and is_fresh(settings.ledger, ensemble):
            begun = begin(settings.ledger, terms, ensemble)
            report(f"Began ledger {begun.place} with id {begun.ledger}")
            return begun.ledger
        return known(settings.ledger, terms, ensemble, settings.ledger_id)
    except (LedgerMissing, LedgerUnknown) as error:
        raise ConfigurationError(f"budget.ledger: {error}") from error


def _start_budget(configuration: Configuration, checked: Checked) -> ActorHandle:
    return budget.start(
        configuration.budget.ledger,
        checked.promise.terms,
        namespace=configuration.namespace,
        create=False,
        identity=checked.ledger,
        lifetime="detached",
    )


def _start_fleet(
    configuration: Configuration, promised: Promise, plans: Sequence[ShardPlan], serving: int, keep: bool
) -> ActorHandle:
    settings = FleetSettings(
        namespace=configuration.namespace,
        plans=tuple(plans),
        settings=promised.settings,
        order=promised.terms.order,
        coordinators=coordinator_names(configuration),
        grow=configuration.shards.count == "auto",
        start_timeout_s=configuration.shards.start_timeout_s,
        stalled_s=configuration.coordinator.step_timeout_s,
    )
    fleet_actor = FleetActor.options(**_options(configuration, fleet.NAME, {}, keep)).remote(settings, serving)
    if ray.get(fleet_actor.settings.remote()) != settings:
        raise ConfigurationError(
            f"namespace: {configuration.namespace} serves with other settings already; stop it, or take another name"
        )
    return fleet_actor


def _start_coordinator(
    configuration: Configuration, promised: Promise, model: Path, name: str, keep: bool
) -> ActorHandle:
    settings = CoordinatorSettings(
        model=model,
        namespace=configuration.namespace,
        budget=budget.NAME,
        fleet=fleet.NAME,
        peers=tuple(other for other in coordinator_names(configuration) if other != name),
        when_exhausted=promised.when_exhausted,
        lease_tokens=configuration.budget.lease_tokens,
        device="cuda" if configuration.coordinator.num_gpus else "cpu",
        threads=os.cpu_count() or 1,
        **configuration.coordinator.model_dump(exclude={"num_cpus", "num_gpus", "memory_gib", "replicas"}),
    )
    options = _options(configuration, name, {"OMP_NUM_THREADS": "1"}, keep)
    return CoordinatorActor.options(**_reserved(configuration), **options).remote(settings)


def _capacity(configuration: Configuration) -> int:
    """Generations that the coordinators advance together."""
    return configuration.coordinator.max_live * configuration.coordinator.replicas


def _start_batches(configuration: Configuration, model: Path, keep: bool) -> ActorHandle | None:
    if not configuration.batches.enabled:
        return None
    settings = gateway_settings(configuration, model)
    capacity = _capacity(configuration)
    return batches.start(keys_database(configuration), settings, capacity=capacity, lifetime="detached", keep=keep)


def _start_alerts(configuration: Configuration, keep: bool) -> ActorHandle | None:
    watched = Watched(
        ensemble=configuration.http.served_model_names[0],
        namespace=configuration.namespace,
        coordinators=coordinator_names(configuration),
        budget=budget.NAME,
        fleet=fleet.NAME,
        keys=keys.NAME,
    )
    return alerts.start(keys_database(configuration), configuration.alerts, watched, lifetime="detached", keep=keep)


def _reserved(configuration: Configuration) -> dict[str, object]:
    """What a coordinator reserves; several of them run on different nodes where there are as many."""
    coordinator = configuration.coordinator
    return {
        "num_cpus": coordinator.num_cpus,
        "num_gpus": coordinator.num_gpus,
        "memory": round(coordinator.memory_gib * 2**30),
        "scheduling_strategy": "SPREAD" if coordinator.replicas > 1 else "DEFAULT",
    }


def _options(configuration: Configuration, name: str, environment: Mapping[str, str], keep: bool) -> dict[str, object]:
    return {
        "name": name,
        "get_if_exists": keep,
        "namespace": configuration.namespace,
        "lifetime": "detached",
        "runtime_env": {"env_vars": dict(environment)},
    }


def _listen(configuration: Configuration) -> str:
    """Open the port; until there is a route, whoever asks is told 404."""
    http = configuration.http
    options = HTTPOptions(host=http.host, port=http.port)
    try:
        serve.start(http_options=options, logging_config=LoggingConfig(encoding="JSON"))
    except RayTaskError as error:  # the proxy's own words
        raise ConfigurationError(
            f"http.port: {http.host}:{http.port} cannot be listened on ({error.cause}); free it, or choose another"
        ) from error
    return f"http://{http.host}:{http.port}"
