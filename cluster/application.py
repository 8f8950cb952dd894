"""The deployment as Ray Serve's configuration file starts it: `import_path: cluster.application:build`.

Ray Serve calls `build` in a task on the cluster, again whenever the application is deployed anew. Actors that live
already are kept: what is deployed anew is the HTTP route alone, and beside it the deployment `shards`, whose number of
replicas is the number of shards: set it in the configuration file, and deploy that again, to let parts join or leave.
"""

import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict
from ray.serve import Application

from cluster.configuration import Configuration, EnsembleConfiguration
from cluster.launch import EnsembleActors, check_ensemble, check_keys, gateway, start_actors
from services.fleet import fleet
from services.fleet.replicas import DEPLOYMENT, ShardReplica

_log = logging.getLogger("ray.serve")


class Arguments(BaseModel):
    """`args` of the application in Serve's configuration. `config` is the YAML file, the same on every node."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: Path


def build(arguments: Arguments) -> Application:
    """Start what does not live already, and return the route to it.

    Host and port are Serve's own (`http_options`); `http.host` and `http.port` are not used.

    Raises:
        ManifestError, PublicModelError, LedgerError, ConfigurationError: see `cluster.launch`; Serve shows the message
            as the application's status.
    """
    configuration = Configuration.load(arguments.config)
    check_keys(configuration, _log.warning, listens=False)
    checked = [check_ensemble(each, _log.info) for each in configuration.served]
    actors = start_actors(configuration, checked, _log.info, keep=True)
    return gateway(configuration, checked, *(_shards(each, actors[each.name]) for each in configuration.served))


def _shards(configuration: EnsembleConfiguration, actors: EnsembleActors) -> Application:
    """The deployment that stands for the shards of an ensemble: `shards`, or `shards-NAME` for one of `ensembles`."""
    name = f"{DEPLOYMENT}-{configuration.name}" if configuration.own_shares else DEPLOYMENT
    replicas = ShardReplica.options(name=name, num_replicas=len(actors.shard_map().groups))  # type: ignore[attr-defined]
    application: Application = replicas.bind(configuration.namespace, fleet.NAME, name)
    return application
