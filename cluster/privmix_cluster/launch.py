"""Starts the actors of a deployment and its HTTP route from a configuration, and stops them."""

import logging
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve import Application
from ray.serve.config import HTTPOptions
from ray.serve.context import _get_global_client
from ray.serve.schema import LoggingConfig

from privmix.coordinator.coordinator import Coordinator
from privmix.fleet.shard_map import ShardMap
from privmix.foundation.actors import HEAD
from privmix.foundation.errors import ConfigurationError, WorkError
from privmix.foundation.urls import http_url
from privmix.gateway.deployment import Gateway
from privmix.gateway.settings import ClientSettings, RequestSettings, ServedEnsemble
from privmix.keys import actor as keys
from privmix.keys.records import Secret
from privmix_cluster.checks import (
    CheckedEnsemble,
    Report,
    check_ensemble,
    check_keys,
    keys_database,
)
from privmix_cluster.configuration import Configuration
from privmix_cluster.ensemble_actors import start_ensemble, stop_ensemble
from privmix_cluster.named_actors import all_or_none, call, kill
from privmix_cluster.ports import cannot_listen, claimed

APPLICATION = "privmix"


@dataclass(frozen=True)
class Service:
    """Holds a running service. `stop` returns unused budget; without it, the coordinators' leases stay charged.

    Attributes:
        url: the base URL of the HTTP route.
        ensemble: the names of its actors, for gateways.
        shard_map: what it served at its start.
    """

    url: str
    configuration: Configuration
    ensemble: ServedEnsemble
    shard_map: ShardMap

    def stop(self) -> None:
        """Stops the service.

        The coordinators end the open answers before the route closes, so that each client is told why.
        """
        namespace = self.configuration.namespace
        for coordinator in self.ensemble.coordinators:
            call(coordinator, namespace, Coordinator.close)
        serve.delete(APPLICATION)
        stop_ensemble(self.ensemble)
        kill(keys.NAME, namespace)


def launch(configuration: Configuration, report: Report = lambda step: None) -> Service:
    """Starts all actors and the HTTP route on the connected Ray cluster.

    Args:
        report: is called with a description of each step before the step begins.

    Raises:
        ManifestError, PublicModelError, LedgerError, ConfigurationError: the message says what is wrong and how to fix
            it. All started actors are stopped.
    """
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    checked = check_ensemble(configuration, report, may_begin=configuration.budget.create)
    check_keys(configuration, report)
    with _port_claimed(configuration), all_or_none(configuration.namespace):
        _listen(configuration)
        shard_map = start_actors(configuration, checked, report)
        report("Opening the HTTP route")
        if ray.available_resources().get("CPU", 0) < configuration.http.replicas:
            report("WARNING: the HTTP route waits for a free CPU, and the cluster has none: lower shards.num_cpus")
        _open(gateway(configuration, checked, num_replicas=configuration.http.replicas))
    url = http_url(configuration.http.host, configuration.http.port)
    return Service(url, configuration, checked.served, shard_map)


def start_actors(
    configuration: Configuration,
    checked: CheckedEnsemble,
    report: Report = lambda step: None,
    *,
    keep: bool = False,
) -> ShardMap:
    """Starts all actors behind the HTTP route and waits until they are ready.

    Args:
        keep: use running actors with these names, instead of raising an error.

    Raises:
        LedgerError, ConfigurationError: the message says what is wrong and how to fix it. All started actors are
            stopped.
    """
    database, namespace = keys_database(configuration), configuration.namespace
    with all_or_none(namespace):
        keys.start(database, namespace=namespace, lifetime="detached", keep=keep)
        return start_ensemble(checked, database, report, keep=keep)


def _open(route: Application) -> None:
    """Deploys the route and waits until it serves.

    Raises:
        WorkError: it could not be deployed. Nothing of it is left.
    """
    try:
        serve.run(route, name=APPLICATION, route_prefix="/")
    except BaseException as error:
        serve.delete(APPLICATION, _blocking=False)
        if isinstance(error, RuntimeError):
            raise WorkError(f"the HTTP route could not be opened: {error}") from error
        raise


def gateway(configuration: Configuration, checked: CheckedEnsemble, **options: Any) -> Application:
    """Returns the HTTP route as a Serve application. `options` are those of its deployment."""
    route = Gateway.options(**options)  # type: ignore[attr-defined]
    application: Application = route.bind(request_settings(configuration, checked))
    return application


def request_settings(configuration: Configuration, checked: CheckedEnsemble) -> RequestSettings:
    """Returns the settings of the gateways."""
    return RequestSettings(
        ensemble=checked.served,
        api_key_hashes=tuple(Secret(key.get_secret_value()).hash for key in configuration.http.api_keys),
        keys_actor=keys.NAME,
        **configuration.http.model_dump(include=set(ClientSettings.model_fields)),
    )


def _port_claimed(configuration: Configuration) -> AbstractContextManager[None]:
    """Claims the port if the service will open it on this machine.

    Raises:
        ConfigurationError: see `_serve_listens`.
    """
    if _serve_listens(configuration):
        return nullcontext()
    head = next(node["NodeID"] for node in ray.nodes() if HEAD.keys() <= node["Resources"].keys())
    if ray.get_runtime_context().get_node_id() != head:
        return nullcontext()
    return claimed(("http.port", configuration.http.host, configuration.http.port))


def _serve_listens(configuration: Configuration) -> bool:
    """Returns whether Serve of this cluster has the port. Stops one that listens elsewhere for nothing.

    Raises:
        ConfigurationError: the cluster serves privmix already, or its Serve listens elsewhere for other applications.
    """
    client = _get_global_client(raise_if_no_controller_running=False)
    if client is None:
        return False
    http, started = configuration.http, client.http_config
    running = [name for name, each in serve.status().applications.items() if each.status != "DELETING"]
    if APPLICATION in running:  # a second deployment would replace the route of the first
        raise ConfigurationError(
            "namespace: this Ray cluster serves privmix already, and has one HTTP route; stop that service, or start "
            "another cluster"
        )
    if (started.host, started.port) == (http.host, http.port):
        return True
    if running:
        raise ConfigurationError(
            f"http.port: Ray Serve of this cluster listens on {started.host}:{started.port} for "
            f"{', '.join(running)}; set http.host and http.port to these"
        )
    serve.shutdown()  # a second start would ignore its options
    return False


def _listen(configuration: Configuration) -> None:
    """Opens the port. Requests get 503 until the route serves.

    Raises:
        ConfigurationError: the port cannot be opened.
    """
    http = configuration.http
    options = HTTPOptions(host=http.host, port=http.port)
    try:
        serve.start(http_options=options, logging_config=LoggingConfig(encoding="JSON"))
    except RayTaskError as error:  # its cause is the error of the HTTP proxy
        raise cannot_listen(("http.port", http.host, http.port), error.cause) from error
