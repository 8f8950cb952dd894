"""Starts the actors of a deployment and its HTTP route from a configuration, and stops them."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError
from ray.serve import Application, RunTarget
from ray.serve.config import HTTPOptions
from ray.serve.schema import LoggingConfig
from ray.util import list_named_actors

from cluster.checks import (
    CheckedEnsemble,
    Report,
    check_cohorts,
    check_ensemble,
    check_files,
    check_keys,
    coordinator_names,
    keys_database,
)
from cluster.configuration import Configuration, EnsembleConfiguration
from cluster.promise import Promise
from cluster.topology import plan_shards, shards_served
from services.actors import remote
from services.alerts import actor as alerts
from services.alerts.actor import ServiceActors
from services.batches import actor as batches
from services.budget import actor as budget
from services.budget.receipt import anchors_of
from services.coordinator.coordinator import Coordinator, CoordinatorActor, CoordinatorSettings
from services.cpus import available_cpus
from services.database.service import ServiceDatabase
from services.ensembles import actor as ensembles
from services.ensembles.records import EnsembleList, ServedEnsemble
from services.errors import ConfigurationError, CoordinatorUnavailable, FleetError, LedgerError, WorkError
from services.fleet import fleet
from services.fleet.fleet import Fleet, FleetActor, FleetSettings
from services.fleet.plan import ShardPlan
from services.fleet.shard_map import ShardMap
from services.fleet.size import FleetSize
from services.gateway.deployment import Gateway
from services.keys import actor as keys
from services.keys.records import Secret
from services.keys.store import KeyStore
from services.requests.settings import ClientSettings, RequestSettings
from services.retrying import pauses, repeated_in_thread

APPLICATION = "privmix"
CLOSING_S = 10.0
PATIENCE_S = 60.0
"""How long a start waits for shards that run but are too busy to answer."""


@dataclass(frozen=True)
class EnsembleActors:
    """Holds the actors of one ensemble. All are detached and have names. The fleet owns the shards."""

    promise: Promise
    fleet: ActorHandle
    coordinators: tuple[ActorHandle, ...]
    budget: ActorHandle

    def shard_map(self) -> ShardMap:
        shard_map: ShardMap = ray.get(self.fleet.shard_map.remote())
        return shard_map


@dataclass(frozen=True)
class Service:
    """Holds a running service. `stop` returns unused budget; without it, the coordinators' leases stay charged.

    Attributes:
        url: the base URL of the HTTP route.
        started: the ensembles that started with the service.
        actors: the actors of these ensembles, by the ensembles' names.
    """

    url: str
    configuration: Configuration
    started: Sequence[ServedEnsemble]
    actors: Mapping[str, EnsembleActors]

    def stop(self) -> None:
        """Stops the service, including ensembles that were added while it ran.

        The coordinators end the open answers before the route closes, so that each client is told why.
        """
        served = _served_now(self.configuration) or self.started
        _call(batches.NAME, self.configuration.namespace, batches.Batches.give_up)
        for name in (alerts.NAME, batches.NAME):  # these two call the other actors, so they stop first
            _kill(name, self.configuration.namespace)
        for ensemble in served:
            for coordinator in ensemble.coordinators:
                _call(coordinator, ensemble.namespace, Coordinator.close)
        serve.delete(APPLICATION)
        for ensemble in served:
            stop_ensemble(ensemble)
        for name in (ensembles.NAME, keys.NAME):
            _kill(name, self.configuration.namespace)


def launch(configuration: Configuration, report: Report = lambda step: None) -> Service:
    """Starts all actors and the HTTP route on the connected Ray cluster.

    Args:
        report: is called with a description of each step before the step begins.

    Raises:
        ManifestError, PublicModelError, LedgerError, ConfigurationError: the message says what is wrong and how to fix
            it. All started actors are stopped.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    check_files(configuration)
    check_cohorts(configuration)
    checked = [check_ensemble(ensemble, report, may_begin=ensemble.budget.create) for ensemble in configuration.served]
    check_keys(configuration, report)
    route = RunTarget(gateway(configuration, checked), APPLICATION, "/")
    has_room, is_deployed = _route_has_room(configuration, checked), False
    with _all_or_none(configuration.namespace), _deployed_or_deleted() as deploy:

        def open_early() -> None:
            """Listens, so that a used port ends the start at once, and deploys the route, whose imports take seconds.

            Then it waits for the actors (`Gateway`).
            """
            nonlocal is_deployed
            _listen(configuration)
            if has_room and APPLICATION not in serve.status().applications:
                deploy(route)
                is_deployed = True

        actors = start_actors(configuration, checked, report, meanwhile=open_early)
        report("Opening the HTTP route")
        if not is_deployed:
            if ray.available_resources().get("CPU", 0) < configuration.http.replicas:
                report("WARNING: the HTTP route waits for a free CPU, and the cluster has none: lower shards.num_cpus")
            deploy(route)
        _wait_for_route()
    url = f"http://{configuration.http.host}:{configuration.http.port}"
    return Service(url, configuration, [ensemble.served for ensemble in checked], actors)


def start_actors(
    configuration: Configuration,
    checked: Sequence[CheckedEnsemble],
    report: Report = lambda step: None,
    *,
    keep: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> dict[str, EnsembleActors]:
    """Starts all actors behind the HTTP route and waits until they are ready. Returns them by ensemble name.

    Args:
        keep: use running actors with these names, instead of raising an error.
        meanwhile: is called once, while shards load, which takes longest.

    Raises:
        LedgerError, ConfigurationError: the message says what is wrong and how to fix it. All started actors are
            stopped.
    """
    database, namespace = keys_database(configuration), configuration.namespace
    settings = request_settings(configuration, checked)
    with _all_or_none(configuration.namespace), ThreadPoolExecutor() as beside:
        others: list[Future[Any]] = []
        listed: ActorHandle | None = None

        def start_others() -> None:
            nonlocal listed
            if others:
                return
            meanwhile()
            others.append(beside.submit(keys.start, database, namespace=namespace, lifetime="detached", keep=keep))
            others.append(beside.submit(_start_batches, configuration, settings, keep))  # run when a gateway serves
            if not keep:
                listed = ensembles.prepare(database, namespace=namespace, lifetime="detached")

        started = {
            ensemble.served.name: start_ensemble(ensemble, database, report, keep=keep, meanwhile=start_others)
            for ensemble in checked
        }
        for other in others:
            other.result()
        # The last one that gateways need: they wait for it.
        ensembles.start(
            database, settings.ensembles, namespace=namespace, lifetime="detached", keep=keep, prepared=listed
        )
        _start_alerts(configuration, keep)
    return started


def start_ensemble(
    checked: CheckedEnsemble,
    database: str,
    report: Report = lambda step: None,
    *,
    keep: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> EnsembleActors:
    """Starts the actors of one ensemble and waits until they are ready.

    Args:
        database: the database of the service, which has the last number of shards that `privmix scale` set.
        keep, meanwhile: see `start_actors`.

    Raises:
        LedgerError, ConfigurationError, KeysError: the message says what is wrong and how to fix it. All started actors
            are stopped.
    """
    configuration, promised, model = checked.configuration, checked.promise, checked.model
    with _all_or_none(configuration.namespace):
        gpus = ray.cluster_resources().get("GPU", 0)
        protocol = promised.protocol
        plans = plan_shards(configuration, checked.manifest, model, gpus, protocol.halves, protocol.rows)
        serving, size = shards_served(configuration, checked.manifest), None
        if configuration.shards.count != "auto":
            size = FleetSize(database, configuration.namespace, serving)
            serving = min(size.read(), len(plans))
        if size and serving != size.configured:
            report(f"Serving {serving} of {len(plans)} shards, as `privmix scale` chose, not {size.configured}")
        parts = sum(plan.parts for plan in plans[:serving])
        report(f"Loading {parts} parts into {serving} shard{'s' * (serving > 1)}")
        fleet_actor = _start_fleet(configuration, promised, plans, serving, size, keep)
        loaded = fleet_actor.start.remote()  # takes longest, so the other actors start meanwhile
        meanwhile()
        # Another service that uses this ledger continues until this one makes its first charge.
        report("Opening the ledger")
        kept = _kept_budget(configuration, promised) if keep else None
        budget_actor = kept or _start_budget(configuration, checked, database)
        if not _has_room(plans[:serving], configuration):
            _wait_for(loaded)  # the autoscaler adds nodes for the shards, over which coordinators can spread
        names = coordinator_names(configuration)
        report(f"Starting the coordinator{'s' * (len(names) > 1)}")
        coordinators = tuple(_start_coordinator(configuration, promised, model, name, keep) for name in names)
        report("Waiting for parts and coordinators")
        _wait_for(loaded)
        wait_until_healthy(coordinators)
    return EnsembleActors(promised, fleet_actor, coordinators, budget_actor)


def _route_has_room(configuration: Configuration, checked: Sequence[CheckedEnsemble]) -> bool:
    """Returns whether the cluster has the CPUs that the route reserves beside all shards and coordinators."""
    cpus: float = configuration.http.replicas
    for ensemble in checked:
        coordinator, shards = ensemble.configuration.coordinator, ensemble.configuration.shards
        groups = math.ceil(len(ensemble.manifest.parts) / shards.parts_per_shard)
        cpus += coordinator.replicas * coordinator.num_cpus + groups * shards.copies * shards.num_cpus
    return bool(cpus <= ray.available_resources().get("CPU", 0))


@contextmanager
def _deployed_or_deleted() -> Iterator[Callable[[RunTarget], None]]:
    """Yields what deploys the route, and does not wait for it. Deletes what was deployed if the block fails."""
    deployed = []

    def deploy(route: RunTarget) -> None:
        deployed.append(route.name)
        serve.run_many([route], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)

    try:
        yield deploy
    except BaseException:
        for name in deployed:
            serve.delete(name, _blocking=False)
        raise


def _wait_for_route() -> None:
    """Waits until the route serves.

    Raises:
        WorkError: it could not be deployed.
    """
    while (route := serve.status().applications[APPLICATION]).status != "RUNNING":
        if route.status == "DEPLOY_FAILED":
            raise WorkError(f"the HTTP route could not be opened: {route.message}")
        time.sleep(0.1)


def _has_room(plans: Sequence[ShardPlan], configuration: EnsembleConfiguration) -> bool:
    """Returns whether the nodes of the cluster have all resources that shards and coordinators reserve."""
    coordinator, total = configuration.coordinator, ray.cluster_resources()
    cpus = coordinator.replicas * coordinator.num_cpus + sum(plan.copies * plan.num_cpus for plan in plans)
    gpus = coordinator.replicas * coordinator.num_gpus + sum(plan.copies * plan.num_gpus for plan in plans)
    return bool(cpus <= total.get("CPU", 0) and gpus <= total.get("GPU", 0))


def _wait_for(loaded: "ray.ObjectRef[ShardMap]") -> None:
    """Waits until the fleet has started its shards.

    Raises:
        ConfigurationError: a shard could not be started.
    """
    try:
        ray.get(loaded)
    except FleetError as error:
        raise ConfigurationError(f"shards: {getattr(error, 'cause', error)}") from error


def wait_until_healthy(coordinators: Sequence[ActorHandle], patience_s: float = PATIENCE_S) -> None:
    """Waits until every coordinator is healthy. A shard that is too busy for one answer must not end a whole start.

    Raises:
        WorkError: a coordinator is not healthy after `patience_s` seconds. The message says what does not work.
    """
    try:
        repeated_in_thread(
            lambda: ray.get([coordinator.health.remote() for coordinator in coordinators]),
            CoordinatorUnavailable,
            pauses(1.0),
            patience_s=patience_s,
        )
    except CoordinatorUnavailable as error:
        raise WorkError(f"the service did not become healthy: {getattr(error, 'cause', error)}") from error


def stop_ensemble(ensemble: ServedEnsemble) -> None:
    """Stops the actors of one ensemble. Coordinators that respond first return unused budget."""
    namespace = ensemble.namespace
    for name in ensemble.coordinators:
        _call(name, namespace, Coordinator.close)  # leases of a coordinator that does not respond stay charged
    _call(ensemble.budget, namespace, budget.Budget.give_up)  # so that another deployment can open the ledger at once
    for name in ensemble.coordinators:
        _kill(name, namespace)
    _call(ensemble.fleet, namespace, Fleet.close)
    for name in (ensemble.fleet, ensemble.budget):
        _kill(name, namespace)


def gateway(configuration: Configuration, checked: Sequence[CheckedEnsemble], *beside: Application) -> Application:
    """Returns the HTTP route as a Serve application, together with the deployments `beside` it."""
    settings = request_settings(configuration, checked)
    route = Gateway.options(num_replicas=configuration.http.replicas)  # type: ignore[attr-defined]
    application: Application = route.bind(settings, configuration.batches, *beside)
    return application


def request_settings(configuration: Configuration, checked: Sequence[CheckedEnsemble]) -> RequestSettings:
    """Returns the settings of the gateways and of the batches' actor."""
    return RequestSettings(
        namespace=configuration.namespace,
        ensembles=tuple(ensemble.served for ensemble in checked),
        ensembles_actor=ensembles.NAME,
        api_key_hashes=tuple(Secret(key.get_secret_value()).hash for key in configuration.http.api_keys),
        keys_actor=keys.NAME,
        batches_actor=batches.NAME if configuration.batches.enabled else None,
        **configuration.http.model_dump(include=set(ClientSettings.model_fields)),
    )


def _served_now(configuration: Configuration) -> list[ServedEnsemble]:
    """Returns the ensembles of a running service, including added ones. Empty if the service does not respond."""
    with suppress(RayError, ValueError):
        actor = ray.get_actor(ensembles.NAME, configuration.namespace)
        current: EnsembleList = ray.get(actor.current.remote(), timeout=CLOSING_S)
        return [entry.ensemble for entry in current.entries]
    return []


def _call(name: str, namespace: str, method: Callable[[Any], object]) -> None:
    """Calls a method of an actor's class. Does nothing if the actor is gone or does not respond."""
    with suppress(RayError, LedgerError, TimeoutError, ValueError):
        ray.get(remote(method)(ray.get_actor(name, namespace)), timeout=CLOSING_S)


def _kill(name: str, namespace: str) -> None:
    with suppress(ValueError):  # the actor is gone already
        ray.kill(ray.get_actor(name, namespace))


@contextmanager
def _all_or_none(namespace: str) -> Iterator[None]:
    """Stops all actors that the block started if the block fails. Actors that ran before are kept."""
    before = _running(namespace)
    try:
        yield
    except BaseException:
        for actor in _running(namespace) - before:
            if actor[0] == fleet.NAME:  # first, because while it starts it makes shards
                _kill(*actor)
        for actor in _running(namespace) - before:
            _kill(*actor)
        raise


def _running(namespace: str) -> set[tuple[str, str]]:
    """Returns the names and namespaces of the actors of a service and of its named ensembles."""
    actors = {(actor["name"], actor["namespace"]) for actor in list_named_actors(all_namespaces=True)}
    return {(name, other) for name, other in actors if other == namespace or other.startswith(f"{namespace}.")}


def _kept_budget(configuration: EnsembleConfiguration, promised: Promise) -> ActorHandle | None:
    """Returns the running budget actor, or None.

    Raises:
        ConfigurationError: it enforces another budget.
    """
    try:
        actor = ray.get_actor(budget.NAME, configuration.namespace)
    except ValueError:
        return None
    if ray.get(actor.ready.remote()) != promised.terms:
        raise ConfigurationError(
            f"namespace: {configuration.namespace} already serves with another budget; stop it, or choose another "
            "namespace"
        )
    return actor


def _start_budget(configuration: EnsembleConfiguration, checked: CheckedEnsemble, database: str) -> ActorHandle:
    return budget.start(
        configuration.budget.ledger,
        checked.promise.terms,
        namespace=configuration.namespace,
        create=False,
        identity=checked.ledger,
        lifetime="detached",
        anchors=anchors_of(configuration.ensemble, configuration.budget.anchor),
        clients_need_keys=KeyStore(ServiceDatabase(database)).required(),
        key=configuration.budget.key(),
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
        protocol_settings=promised.settings,
        accountant=promised.terms.accountant,
        coordinators=coordinator_names(configuration),
        grow=configuration.shards.count == "auto",
        start_timeout_s=configuration.shards.start_timeout_s,
        stalled_s=configuration.coordinator.step_timeout_s,
        planned=promised.protocol,
    )
    fleet_actor = FleetActor.options(**_options(configuration, fleet.NAME, {}, keep)).remote(settings, serving, size)
    if keep and ray.get(fleet_actor.settings.remote()) != settings:
        raise ConfigurationError(
            f"namespace: {configuration.namespace} already serves with other settings; stop it, or choose another "
            "namespace"
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
        threads=available_cpus(),
        **configuration.coordinator.model_dump(exclude={"num_cpus", "num_gpus", "memory_gib", "replicas"}),
    )
    options = _options(configuration, name, {"OMP_NUM_THREADS": "1"}, keep)
    return CoordinatorActor.options(**_reserved(configuration), **options).remote(settings)


def _start_batches(configuration: Configuration, settings: RequestSettings, keep: bool) -> None:
    if not configuration.batches.enabled:
        return
    capacity = max(ensemble.capacity for ensemble in settings.ensembles)
    batches.start(
        keys_database(configuration), configuration.batches, settings, capacity=capacity, lifetime="detached", keep=keep
    )


def _start_alerts(configuration: Configuration, keep: bool) -> None:
    service = ServiceActors(configuration.namespace, keys.NAME, ensembles.NAME)
    alerts.start(keys_database(configuration), configuration.alerts, service, lifetime="detached", keep=keep)


def _reserved(configuration: EnsembleConfiguration) -> dict[str, object]:
    """Returns the resources that a coordinator reserves. Several coordinators spread over the nodes."""
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


def _listen(configuration: Configuration) -> None:
    """Opens the port. Requests get 404 until the route is deployed, then wait until it serves.

    Raises:
        ConfigurationError: the port cannot be opened.
    """
    http = configuration.http
    options = HTTPOptions(host=http.host, port=http.port)
    try:
        serve.start(http_options=options, logging_config=LoggingConfig(encoding="JSON"))
    except RayTaskError as error:  # its cause is the error of the HTTP proxy
        raise ConfigurationError(
            f"http.port: cannot listen on {http.host}:{http.port} ({error.cause}); free the port or choose another"
        ) from error
