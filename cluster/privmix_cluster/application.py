"""Builds the application for Ray Serve's configuration file: `import_path: privmix_cluster.application:build`.

Ray Serve calls `build` in a task on any node, once for each deployment of the configuration file. The configuration is
read on the head node, which alone needs the secrets, and the actors that get them run there. Running actors
are kept. A new deployment replaces only the HTTP route.
"""

import logging
from pathlib import Path

import ray
from pydantic import BaseModel, ConfigDict
from ray.exceptions import RayTaskError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy
from ray.serve.exceptions import RayServeException

from privmix.foundation.actors import HEAD
from privmix.foundation.errors import InputError, WorkError
from privmix.gateway.autoscaling import one_for_each_node
from privmix_cluster.checks import check_ensemble, check_keys
from privmix_cluster.configuration import Configuration
from privmix_cluster.launch import gateway, start_actors
from privmix_cluster.named_actors import fleet_of

logger = logging.getLogger("ray.serve")


class Arguments(BaseModel):
    """Describes `args` of the application in Serve's configuration. `config` is the YAML file on the head node."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: Path


def build(arguments: Arguments) -> Application:
    """Starts the actors that do not run yet and returns the HTTP route to them.

    Each node with a shard gets a gateway. The host and the port come from Serve's `http_options`; `http.host`,
    `http.port` and `http.replicas` are not used.

    Raises:
        RayServeException: see `privmix_cluster.checks`. Serve shows the message as the application's status. Of another
            error it would show three tracebacks, with the message at their end.
    """
    on_head = ray.remote(num_cpus=0, resources=HEAD, max_calls=1)(_build)
    try:
        application: Application = ray.get(on_head.remote(arguments.config))
    except RayTaskError as error:
        if isinstance(error.cause, InputError | WorkError):
            raise RayServeException(str(error.cause)) from None
        raise
    return application


def _build(config: Path) -> Application:
    configuration = Configuration.load(config)
    check_keys(configuration, logger.warning, listens=False)
    checked = check_ensemble(configuration, logger.info)
    start_actors(configuration, checked, logger.info, keep=True)
    scaling = AutoscalingConfig(
        initial_replicas=max(1, ray.get(fleet_of(configuration.namespace).nodes.remote())),
        max_replicas=1000,
        upscale_delay_s=0,
        downscale_delay_s=60,
        policy=AutoscalingPolicy(policy_function=one_for_each_node),
    )
    return gateway(configuration, checked, autoscaling_config=scaling, max_replicas_per_node=1)
