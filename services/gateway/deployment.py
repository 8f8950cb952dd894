"""Defines the gateway as a Ray Serve deployment."""

import logging

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from services import tracing
from services.gateway.app import build_app
from services.gateway.models import Models
from services.gateway.settings import GatewaySettings


def _log_with_serve() -> None:
    """Sends the gateway's log to Serve's handlers: as JSON with Serve's request id."""
    gateway_logger = logging.getLogger("services.gateway")
    gateway_logger.setLevel(logging.INFO)
    gateway_logger.handlers = logging.getLogger("ray.serve").handlers
    gateway_logger.propagate = False


# Serve's access log is disabled, because the gateway's own log line contains more.
@serve.deployment(
    name="gateway",
    max_ongoing_requests=1024,
    logging_config=LoggingConfig(encoding="JSON", enable_access_log=False),
)
@serve.ingress()
class Gateway:
    """Implements a replica of the gateway: `Gateway.options(num_replicas=2).bind(settings)`.

    A waiting stream costs almost nothing, so a replica accepts many. The keys actor and the coordinator limit the load.
    """

    def __init__(self, settings: GatewaySettings, *beside: DeploymentHandle) -> None:
        """`beside` makes Serve deploy these deployments together with the gateway. They are not called."""
        self._settings = settings
        _log_with_serve()
        tracing.prepare()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Builds the app in the replica. Ray Serve calls it."""
        # Serve's proxy adds the request id to the response.
        return build_app(self._settings, Models(self._settings), answer_request_id=False)
