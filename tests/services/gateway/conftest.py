"""The real app with no coordinator behind it: what passes every check ends in 503, so no refusal went further."""

from collections.abc import Callable
from typing import Any

import pytest
from starlette.testclient import TestClient

from services.gateway.app import build_app
from services.gateway.hub import Hub
from services.gateway.prompts import Prompts
from services.gateway.settings import GatewaySettings
from services.gateway.status import Status
from services.training import public_model

NOBODY = "a-namespace-without-actors"

MakeClient = Callable[..., TestClient]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    return Prompts.load(public_model.resolve())


@pytest.fixture(scope="session")
def make_client(prompts: Prompts) -> MakeClient:
    """A client of an app with these settings changed."""

    def make(**changes: Any) -> TestClient:
        settings = GatewaySettings(
            **{
                "model": public_model.resolve(),
                "context_length": 512,
                "served_model_names": ("privmix", "clinic"),
                "namespace": NOBODY,
                "max_body_bytes": 64 * 1024,
                "max_n": 4,
                "max_prompts": 4,
                "max_tokens": 256,
                "recovery_s": 0,
                **changes,
            }
        )
        hub = Hub(settings.namespace, settings.coordinator_actors, settings.stall_timeout_s, settings.recovery_s)
        status = Status(
            settings.namespace, settings.coordinator_actors, settings.budget_actor, settings.fleet_actor, 1.0, 1.0
        )
        return TestClient(build_app(settings, prompts, hub, status))

    return make


@pytest.fixture(scope="session")
def client(make_client: MakeClient) -> TestClient:
    return make_client()
