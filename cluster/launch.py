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

from cluster.configuration import Configuration, ConfigurationError, EnsembleConfiguration
from cluster.promise import Promise, promise
from cluster.topology import plan_shards, shards_served
from services.alerts import actor as alerts
from services.alerts.actor import ServiceActors
from services.batches import actor as batches
from services.budget import actor as budget
from services.budget.errors import LedgerError, LedgerMissing, LedgerUnknown
from services.budget.receipt import begin, is_fresh, known
from services.coordinator.coordinator import CoordinatorActor, CoordinatorSettings
from services.ensembles import actor as ensembles
from services.ensembles.records import Ensemble, EnsembleList
from services.fleet import fleet
from services.fleet.fleet import FleetActor, FleetError, FleetSettings
from services.fleet.plan import ShardPlan
from services.fleet.shard_map import ShardMap
from services.fleet.size import FleetSize
from services.gateway.deployment import Gateway
from services.gateway.settings import ClientSettings, GatewaySettings
from services.keys import actor as keys
from services.keys.database import Database, default_database
from services.keys.store import KeyStore
from services.training.manifest import Manifest
from services.training.public_model import resolve

APPLICATION = "privmix"
LOOPBACK = ("127.0.0.1", "::1", "localhost")
CLOSING_S = 10.0

Report = Callable[[str], None]


@dataclass(frozen=True)
class EnsembleActors:
    """The actors of one ensemble. All are detached and found by name; the fleet owns the shards."""

    promise: Promise
    fleet: ActorHandle
    coordinators: tuple[ActorHandle, ...]
    budget: ActorHandle

    def shard_map(self) -> ShardMap:
        """Who serves now."""
        shard_map: ShardMap = ray.get(self.fleet.shard_map.remote())
        return shard_map


@dataclass(frozen=True)
class Service:
    """What runs. `stop` gives unused budget back; without it the leases of the coordinators stay spent."""

    url: str
    configuration: Configuration
    started: Sequence[Ensemble]
    actors: Mapping[str, EnsembleActors]
    """Of the ensembles that were `started` with it, by their names."""

    def stop(self) -> None:
        """End the service, and the ensembles that were added while it ran."""
        serve.delete(APPLICATION)
        served = _served_now(self.configuration) or self.started
        for name in (alerts.NAME, batches.NAME):  # first, as they use the others
            _kill(name, self.configuration.namespace)
        for ensemble in served:
            stop_ensemble(ensemble)
        for name in (ensembles.NAME, keys.NAME):
            _kill(name, self.configuration.namespace)


def launch(configuration: Configuration, report: Report = lambda step: None) -> Service:
    """Start every actor and the HTTP route on the Ray cluster that this process is connected to.

    Args:
        report: is told each step, in words, before it begins.

    Raises:
        ManifestError, PublicModelError, LedgerError, ConfigurationError: what is wrong and how to mend it; nothing is
            left running.
    """
    checked = [check_ensemble(each, report, may_begin=each.budget.create) for each in configuration.served]
    check_keys(configuration, report)
    url = _listen(configuration)  # before anything is loaded: the port may be another's
    with _all_or_none(configuration.namespace):
        actors = start_actors(configuration, checked, report)
        report("Opening the HTTP route")
        if ray.available_resources().get("CPU", 0) < configuration.http.replicas:
            report("WARNING: no CPU is left for the HTTP route, which waits for one: lower shards.num_cpus")
        serve.run(gateway(configuration, checked), name=APPLICATION, route_prefix="/")
    return Service(url, configuration, [each.served for each in checked], actors)


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
    return configuration.keys.database or default_database(configuration.budget.ledger)


@dataclass(frozen=True)
class Checked:
    """An ensemble that is what its manifest says, and what its configuration promises of it."""

    configuration: EnsembleConfiguration
    manifest: Manifest
    model: Path
    promise: Promise
    ledger: str

    @property
    def served(self) -> Ensemble:
        """The record of this ensemble for the gateways."""
        configuration = self.configuration
        coordinator = configuration.coordinator
        return Ensemble(
            names=configuration.names,
            namespace=configuration.namespace,
            model=self.model,
            context_length=configuration.engine.context_length,
            coordinators=coordinator_names(configuration),
            budget=budget.NAME,
            fleet=fleet.NAME,
            capacity=coordinator.max_live * coordinator.replicas,
            max_waiting=coordinator.max_waiting * coordinator.replicas,
            own_shares=configuration.own_shares,
            recovery_s=coordinator.recovery_s,
            # A step can hang before it fails; then what it needs is waited for, and the first step after it can hang.
            stall_timeout_s=coordinator.recovery_s + 2 * coordinator.step_timeout_s,
        )


def check_ensemble(
    configuration: EnsembleConfiguration, report: Report = lambda step: None, *, may_begin: bool = False
) -> Checked:
    """What can be known to fit before anything is started.

    Args:
        may_begin: begin the ledger of an ensemble that never had one.

    Raises:
        ManifestError, PublicModelError, LedgerError, ConfigurationError: what is wrong and how to mend it.
    """
    report(f"Checking the ensemble of {configuration.name} against its manifest")
    manifest = Manifest.load(configuration.ensemble)
    model = resolve(configuration.model or manifest.base_model)
    manifest.verify(configuration.ensemble, model)
    promised = promise(configuration, manifest)
    report(promised.sentence)
    return Checked(configuration, manifest, model, promised, _ledger_of(configuration, promised, report, may_begin))


def start_actors(
    configuration: Configuration, checked: Sequence[Checked], report: Report = lambda step: None, *, keep: bool = False
) -> dict[str, EnsembleActors]:
    """Start what answers behind the HTTP route, and return, by ensemble, once it can.

    Args:
        keep: take the actors that live already under these names for one's own, instead of refusing to start.

    Raises:
        LedgerError, ConfigurationError: what is wrong and how to mend it; nothing that was started is left running.
    """
    with _all_or_none(configuration.namespace):
        database, namespace = keys_database(configuration), configuration.namespace
        started = {each.served.name: start_ensemble(each, database, report, keep=keep) for each in checked}
        settings = gateway_settings(configuration, checked)
        keys.start(database, namespace=namespace, lifetime="detached", keep=keep)
        ensembles.start(database, settings.ensembles, namespace=namespace, lifetime="detached", keep=keep)
        _start_batches(configuration, settings, keep)
        _start_alerts(configuration, keep)
    return started


def start_ensemble(
    checked: Checked, database: str, report: Report = lambda step: None, *, keep: bool = False
) -> EnsembleActors:
    """Start what answers for one ensemble, and return once it can.

    Args:
        database: the service's, which has the number of shards that `privmix scale` chose last.
        keep: see `start_actors`.

    Raises:
        LedgerError, ConfigurationError, KeysError: what is wrong and how to mend it; nothing that was started is left
            running.
    """
    configuration, promised, model = checked.configuration, checked.promise, checked.model
    with _all_or_none(configuration.namespace):
        gpus = ray.cluster_resources().get("GPU", 0)
        plans = plan_shards(configuration, checked.manifest, model, gpus, halves=promised.protocol.halves)
        serving, size = shards_served(configuration, checked.manifest), None
        if configuration.shards.count != "auto":
            size = FleetSize(database, configuration.namespace, serving)
            serving = min(size.read(), len(plans))
        if size and serving != size.configured:
            report(f"Serving {serving} of {len(plans)} shards, as `privmix scale` chose, not {size.configured}")
        parts = sum(plan.parts for plan in plans[:serving])
        report(f"Loading {parts} parts into {serving} shard{'s' * (serving > 1)}")
        fleet_actor = _start_fleet(configuration, promised, plans, serving, size, keep)
        try:
            ray.get(fleet_actor.start.remote())
        except FleetError as error:
            raise ConfigurationError(f"shards: {getattr(error, 'cause', error)}") from error
        # A service that has the ledger goes on until this one makes its first charge.
        report("Opening the ledger")
        keeper = (keep and _kept_budget(configuration, promised)) or _start_budget(configuration, checked)
        names = coordinator_names(configuration)
        report(f"Starting the coordinator{'s' * (len(names) > 1)}")
        coordinators = tuple(_start_coordinator(configuration, promised, model, name, keep) for name in names)
        ray.get([coordinator.health.remote() for coordinator in coordinators])
    return EnsembleActors(promised, fleet_actor, coordinators, keeper)


def stop_ensemble(ensemble: Ensemble) -> None:
    """End the actors of one ensemble. Actors that answer give unused budget back first."""
    for name in ensemble.coordinators:
        _tell(name, ensemble.namespace, "close")  # leases of one that does not answer stay charged: the safe side
    _tell(ensemble.budget, ensemble.namespace, "release")  # else another deployment waits until it is silent
    for name in ensemble.coordinators:
        _kill(name, ensemble.namespace)
    _tell(ensemble.fleet, ensemble.namespace, "close")
    for name in (ensemble.fleet, ensemble.budget):
        _kill(name, ensemble.namespace)


def coordinator_names(configuration: EnsembleConfiguration) -> tuple[str, ...]:
    """The names of the coordinators' actors."""
    return ("coordinator", *(f"coordinator-{number}" for number in range(1, configuration.coordinator.replicas)))


def gateway(configuration: Configuration, checked: Sequence[Checked], *beside: Application) -> Application:
    """The HTTP route as a Serve application, with other deployments beside it."""
    settings = gateway_settings(configuration, checked)
    route = Gateway.options(num_replicas=configuration.http.replicas)  # type: ignore[attr-defined]
    application: Application = route.bind(settings, *beside)
    return application


def gateway_settings(configuration: Configuration, checked: Sequence[Checked]) -> GatewaySettings:
    """What the gateways, and the batches' actor like them, must be told."""
    return GatewaySettings(
        namespace=configuration.namespace,
        ensembles=tuple(each.served for each in checked),
        ensembles_actor=ensembles.NAME,
        keys_actor=keys.NAME,
        batches_actor=batches.NAME if configuration.batches.enabled else None,
        batches=configuration.batches,
        **configuration.http.model_dump(include=set(ClientSettings.model_fields)),
    )


def _served_now(configuration: Configuration) -> list[Ensemble]:
    """The ensembles of a running service, including those that were added; none if the service does not answer."""
    with suppress(RayError, ValueError):
        actor = ray.get_actor(ensembles.NAME, configuration.namespace)
        current: EnsembleList = ray.get(actor.current.remote(), timeout=CLOSING_S)
        return [entry.ensemble for entry in current.entries]
    return []


def _tell(name: str, namespace: str, method: str) -> None:
    """Call a method of an actor. Does nothing if the actor is gone or does not answer."""
    with suppress(RayError, LedgerError, TimeoutError, ValueError):
        ray.get(getattr(ray.get_actor(name, namespace), method).remote(), timeout=CLOSING_S)


def _kill(name: str, namespace: str) -> None:
    with suppress(ValueError):  # it has ended by itself
        ray.kill(ray.get_actor(name, namespace))


@contextmanager
def _all_or_none(namespace: str) -> Iterator[None]:
    """What is started within is ended again when it fails; what lived before lives on."""
    before = _living(namespace)
    try:
        yield
    except BaseException:
        for name, where in _living(namespace) - before:
            _kill(name, where)
        raise


def _living(namespace: str) -> set[tuple[str, str]]:
    """Names and namespaces of the actors of a service: its own, and those of the ensembles that it names."""
    living = {(actor["name"], actor["namespace"]) for actor in list_named_actors(all_namespaces=True)}
    return {(name, where) for name, where in living if where == namespace or where.startswith(f"{namespace}.")}


def _kept_budget(configuration: EnsembleConfiguration, promised: Promise) -> ActorHandle | None:
    try:
        keeper = ray.get_actor(budget.NAME, configuration.namespace)
    except ValueError:
        return None
    if ray.get(keeper.ready.remote()) != promised.terms:
        raise ConfigurationError(
            f"namespace: {configuration.namespace} serves under another promise already; stop it, or take another name"
        )
    return keeper


def _ledger_of(configuration: EnsembleConfiguration, promised: Promise, report: Report, may_begin: bool) -> str:
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


def _start_budget(configuration: EnsembleConfiguration, checked: Checked) -> ActorHandle:
    return budget.start(
        configuration.budget.ledger,
        checked.promise.terms,
        namespace=configuration.namespace,
        create=False,
        identity=checked.ledger,
        lifetime="detached",
    )


def _start_fleet(
    configuration: EnsembleConfiguration,
    promised: Promise,
    plans: Sequence[ShardPlan],
    serving: int,
    size: FleetSize | None,
    keep: bool,
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
    fleet_actor = FleetActor.options(**_options(configuration, fleet.NAME, {}, keep)).remote(settings, serving, size)
    if ray.get(fleet_actor.settings.remote()) != settings:
        raise ConfigurationError(
            f"namespace: {configuration.namespace} serves with other settings already; stop it, or take another name"
        )
    return fleet_actor


def _start_coordinator(
    configuration: EnsembleConfiguration, promised: Promise, model: Path, name: str, keep: bool
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


def _start_batches(configuration: Configuration, settings: GatewaySettings, keep: bool) -> None:
    if not configuration.batches.enabled:
        return
    capacity = max(each.capacity for each in settings.ensembles)
    batches.start(keys_database(configuration), settings, capacity=capacity, lifetime="detached", keep=keep)


def _start_alerts(configuration: Configuration, keep: bool) -> None:
    service = ServiceActors(configuration.namespace, keys.NAME, ensembles.NAME)
    alerts.start(keys_database(configuration), configuration.alerts, service, lifetime="detached", keep=keep)


def _reserved(configuration: EnsembleConfiguration) -> dict[str, object]:
    """What a coordinator reserves; several of them run on different nodes where there are as many."""
    coordinator = configuration.coordinator
    return {
        "num_cpus": coordinator.num_cpus,
        "num_gpus": coordinator.num_gpus,
        "memory": round(coordinator.memory_gib * 2**30),
        "scheduling_strategy": "SPREAD" if coordinator.replicas > 1 else "DEFAULT",
    }


def _options(
    configuration: EnsembleConfiguration, name: str, environment: Mapping[str, str], keep: bool
) -> dict[str, object]:
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
