"""The gateway as a Ray Serve deployment."""

import logging

from fastapi import FastAPI
from ray import serve
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from services import tracing
from services.gateway.app import build_app
from services.gateway.served import Models
from services.gateway.settings import GatewaySettings


def _log_with_serve() -> None:
    """Send what the gateway logs where Serve logs: as JSON, with Serve's request id."""
    ours = logging.getLogger("services.gateway")
    ours.setLevel(logging.INFO)
    ours.handlers = logging.getLogger("ray.serve").handlers
    ours.propagate = False


# The gateway's own line for each request says more than Serve's would.
@serve.deployment(
    name="gateway",
    max_ongoing_requests=1024,
    logging_config=LoggingConfig(encoding="JSON", enable_access_log=False),
)
@serve.ingress()
class Gateway:
    """One replica: `Gateway.options(num_replicas=2).bind(settings)`.

    A waiting stream costs next to nothing here, so a replica takes many; the coordinator refuses what it cannot hold.
    """

    def __init__(self, settings: GatewaySettings, *beside: DeploymentHandle) -> None:
        """`beside` is not called: Serve deploys with the route what the route is bound to."""
        self._settings = settings
        _log_with_serve()
        tracing.prepare()

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Ray Serve's hook for an app that is built in the replica."""
        # Serve's proxy answers with the request id.
        return build_app(self._settings, Models(self._settings), answer_request_id=False)
