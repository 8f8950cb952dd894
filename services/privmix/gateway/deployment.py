"""Defines the gateway as a Ray Serve deployment."""

import asyncio
import logging
from contextlib import suppress

from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import LoggingConfig
from uvicorn.config import HTTP_PROTOCOLS

from privmix.fleet.fleet import NAME as FLEET
from privmix.fleet.fleet import Fleet
from privmix.foundation.actors import find_actor, remote
from privmix.gateway.app import build_app
from privmix.gateway.autoscaling import NODES
from privmix.gateway.places import PLACES
from privmix.gateway.served_model import ServedModel
from privmix.gateway.settings import RequestSettings

POLL_S = 0.1


def _log_with_serve() -> None:
    """Sends the gateway's log to Serve's handlers: as JSON with Serve's request id."""
    logger = logging.getLogger("privmix.gateway")
    logger.setLevel(logging.INFO)
    logger.handlers = logging.getLogger("ray.serve").handlers
    logger.propagate = False


def _read_with_h11() -> None:
    """Selects the parser of the server that Ray Serve starts in this process.

    httptools, which uvicorn prefers, sends chunk sizes to clients of HTTP/1.0, and HAProxy 2.8 passes them on:
    https://github.com/Kludex/uvicorn/pull/1360.
    """
    HTTP_PROTOCOLS["auto"] = HTTP_PROTOCOLS["h11"]


# Serve's access log is disabled, because the gateway's own log line contains more.
@serve.deployment(
    name="gateway",
    max_ongoing_requests=PLACES,
    logging_config=LoggingConfig(encoding="JSON", enable_access_log=False),
)
@serve.ingress()
class Gateway:
    """Implements a replica of the gateway: `Gateway.options(num_replicas=2).bind(settings)`.

    The keys actor and the coordinator limit the load, and a `KeyService` the places that one key has before.
    """

    def __init__(self, settings: RequestSettings) -> None:
        self._settings = settings
        _log_with_serve()
        _read_with_h11()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Builds the app in the replica once the service's actors are ready. Ray Serve calls it."""
        while not await self._started():
            await asyncio.sleep(POLL_S)
        served = await asyncio.to_thread(ServedModel.of, self._settings.ensemble)
        return build_app(self._settings, served)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Returns what `one_for_each_node` needs. Ray Serve calls it."""
        ensemble = self._settings.ensemble
        return {NODES: await remote(Fleet.nodes)(await find_actor(FLEET, ensemble.namespace))}

    async def _started(self) -> bool:
        """Waits until all parts are loaded for the first time, and the other actors exist.

        Returns False if an actor does not exist or has died.
        """
        ensemble = self._settings.ensemble
        with suppress(RayError, ValueError):
            await remote(Fleet.begun)(await find_actor(FLEET, ensemble.namespace))
            for coordinator in ensemble.coordinators:
                await find_actor(coordinator, ensemble.namespace)
            if self._settings.keys_actor is not None:
                await find_actor(self._settings.keys_actor, ensemble.namespace)
            return True
        return False
