"""Starts the actors of one ensemble and stops them: fleet, ledger and coordinators."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import ray
from ray.actor import ActorHandle

from privmix.budget import actor as budget
from privmix.budget.receipt import anchors_of
from privmix.budget.store.database import LedgerDatabase
from privmix.coordinator.coordinator import Coordinator, CoordinatorActor, CoordinatorSettings
from privmix.database.service import ServiceDatabase
from privmix.fleet import fleet
from privmix.fleet.fleet import Fleet, FleetActor, FleetSettings
from privmix.fleet.plan import ShardPlan
from privmix.fleet.shard_map import ShardMap, Size
from privmix.fleet.size import StoredSize
from privmix.foundation.cpus import available_cpus
from privmix.foundation.errors import ConfigurationError, CoordinatorUnavailable, FleetError, WorkError
from privmix.gateway.settings import ServedEnsemble
from privmix.keys.store import KeyStore
from privmix_cluster.checks import CheckedEnsemble, Report, coordinator_names
from privmix_cluster.configuration import Configuration
from privmix_cluster.named_actors import call, kill
from privmix_cluster.promise import Promise
from privmix_cluster.topology import plan_shards, shards_served

PATIENCE_S = 60.0
"""How long a start waits for shards that run but are too busy to answer."""


def start_ensemble(
    checked: CheckedEnsemble,
    database: str,
    report: Report = lambda step: None,
    *,
    keep: bool = False,
) -> ShardMap:
    """Starts the actors of one ensemble, which are detached, and waits until they are ready. Leaves them if it fails.

    Args:
        database: the database of the service, which has the last size that `privmix scale` set.
        keep: see `start_actors`.

    Raises:
        LedgerError, ConfigurationError, KeysError: the message says what is wrong and how to fix it.
    """
    configuration, promised, model = checked.configuration, checked.promise, checked.model
    gpus = ray.cluster_resources().get("GPU", 0)
    protocol = promised.protocol
    plans = plan_shards(configuration, checked.manifest, model, gpus, protocol.halves, protocol.rows)
    configured = Size(shards_served(configuration, checked.manifest), configuration.shards.copies)
    stored = StoredSize(database, configuration.namespace, configured)
    size = stored.read()
    size = Size(min(size.shards, len(plans)), size.copies)
    if size != configured:
        report(f"Serving {size}, as `privmix scale` chose, not {configured}")
    parts = sum(plan.parts for plan in plans[: size.shards])
    report(f"Loading {parts} parts into {size}")
    # It takes longest, so the other actors start meanwhile.
    loaded = _start_fleet(configuration, promised, plans, size, stored, keep).start.remote()
    # Another service that uses this ledger continues until this one makes its first charge.
    report("Opening the ledger")
    if not (keep and _kept_budget(configuration, promised)):
        _start_budget(configuration, checked, database)
    if not _has_room(plans[: size.shards], size.copies, configuration):
        _wait_for(loaded)  # the autoscaler adds nodes for the shards, over which coordinators can spread
    names = coordinator_names(configuration)
    report(f"Starting the coordinator{'s' * (len(names) > 1)}")
    coordinators = tuple(_start_coordinator(configuration, promised, model, name, keep) for name in names)
    report("Waiting for parts and coordinators")
    shard_map = _wait_for(loaded)
    wait_until_healthy(coordinators)
    return shard_map


def stop_ensemble(ensemble: ServedEnsemble) -> None:
    """Stops the actors of one ensemble. Coordinators that respond first return unused budget."""
    namespace = ensemble.namespace
    for name in ensemble.coordinators:
        call(name, namespace, Coordinator.close)  # leases of a coordinator that does not respond stay charged
    call(budget.NAME, namespace, budget.Budget.give_up)  # so that another deployment can open the ledger at once
    for name in ensemble.coordinators:
        kill(name, namespace)
    call(fleet.NAME, namespace, Fleet.close)
    for name in (fleet.NAME, budget.NAME):
        kill(name, namespace)


def wait_until_healthy(coordinators: Sequence[ActorHandle], patience_s: float = PATIENCE_S) -> None:
    """Waits until every coordinator is healthy. A shard that is too busy for one answer must not end a whole start.

    Raises:
        WorkError: a coordinator is not healthy after `patience_s` seconds. The message says what does not work.
    """
    deadline = time.monotonic() + patience_s
    while True:
        try:
            ray.get([coordinator.health.remote() for coordinator in coordinators])
            return
        except CoordinatorUnavailable as error:
            if time.monotonic() > deadline:
                raise WorkError(f"the service did not become healthy: {getattr(error, 'cause', error)}") from error
        time.sleep(1.0)


def _has_room(plans: Sequence[ShardPlan], copies: int, configuration: Configuration) -> bool:
    """Returns whether the nodes of the cluster have all resources that shards and coordinators reserve."""
    coordinator, total = configuration.coordinator, ray.cluster_resources()
    cpus = coordinator.replicas * coordinator.num_cpus + copies * sum(plan.num_cpus for plan in plans)
    gpus = coordinator.replicas * coordinator.num_gpus + copies * sum(plan.num_gpus for plan in plans)
    return bool(cpus <= total.get("CPU", 0) and gpus <= total.get("GPU", 0))


def _wait_for(loaded: "ray.ObjectRef[ShardMap]") -> ShardMap:
    """Waits until the fleet has started its shards.

    Raises:
        ConfigurationError: a shard could not be started.
    """
    try:
        shard_map: ShardMap = ray.get(loaded)
        return shard_map
    except FleetError as error:
        raise ConfigurationError(f"shards: {getattr(error, 'cause', error)}") from error


def _kept_budget(configuration: Configuration, promised: Promise) -> ActorHandle | None:
    """Returns the running budget actor, or None.

    Raises:
        ConfigurationError: it enforces another budget, or the configuration differs in what running actors keep.
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
    kept = ray.get(actor.settings.remote())
    for name, value in _kept_settings(configuration).items():
        if name not in kept or kept[name] != value:
            raise ConfigurationError(
                f"{name}: {configuration.namespace} already serves with another one, which a deployment does not "
                "change; stop the service and start it again"
            )
    return actor


def _kept_settings(configuration: Configuration) -> dict[str, object]:
    """Returns the settings that running actors keep, by name, without secrets. The fleet has those of the shards."""
    budget, key = configuration.budget, configuration.budget.key()
    return {
        "budget.ledger": LedgerDatabase(budget.ledger, "read").name,
        "budget.anchor": tuple(anchor.name for anchor in anchors_of(configuration.ensemble, budget.anchor)),
        "budget.signing_key": None if key is None else key.name,
        "budget.lease_tokens": budget.lease_tokens,
        "budget.when_exhausted": budget.when_exhausted,
        **{f"coordinator.{name}": value for name, value in configuration.coordinator.model_dump().items()},
    }


def _start_budget(configuration: Configuration, checked: CheckedEnsemble, database: str) -> ActorHandle:
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
        settings=_kept_settings(configuration),
    )


def _start_fleet(
    configuration: Configuration,
    promised: Promise,
    plans: Sequence[ShardPlan],
    size: Size,
    stored: StoredSize,
    keep: bool,
) -> ActorHandle:
    settings = FleetSettings(
        namespace=configuration.namespace,
        plans=tuple(plans),
        protocol_settings=promised.settings,
        accountant=promised.terms.accountant,
        coordinators=coordinator_names(configuration),
        start_timeout_s=configuration.shards.start_timeout_s,
        stalled_s=configuration.coordinator.step_timeout_s,
        planned=promised.protocol,
    )
    fleet_actor = FleetActor.options(**_options(configuration, fleet.NAME, {}, keep)).remote(settings, size, stored)
    if keep and ray.get(fleet_actor.settings.remote()) != settings:
        raise ConfigurationError(
            f"namespace: {configuration.namespace} already serves with other settings; stop it, or choose another "
            "namespace"
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
        threads=available_cpus(),
        **configuration.coordinator.model_dump(exclude={"num_cpus", "num_gpus", "memory_gib", "replicas"}),
    )
    options = _options(configuration, name, {"OMP_NUM_THREADS": "1"}, keep)
    return CoordinatorActor.options(**_reserved(configuration), **options).remote(settings)


def _reserved(configuration: Configuration) -> dict[str, object]:
    """Returns the resources that a coordinator reserves. Several coordinators spread over the nodes."""
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
