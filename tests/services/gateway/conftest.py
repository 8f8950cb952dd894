"""The real app with no coordinator behind it: what passes every check ends in 503, so no refusal went further."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from starlette.testclient import TestClient

from services.ensembles.records import Ensemble
from services.gateway.app import build_app
from services.gateway.prompts import Prompts
from services.gateway.served import Models, prompts_of
from services.gateway.settings import GatewaySettings
from services.training import public_model

NOBODY = "a-namespace-without-actors"

MakeClient = Callable[..., TestClient]


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def prompts() -> Prompts:
    return prompts_of(public_model.resolve())


def ensemble(*names: str, **changes: Any) -> Ensemble:
    """An ensemble that nothing answers for."""
    namespace = f"{NOBODY}.{names[0]}"
    values = {"model": public_model.resolve(), "context_length": 512, "recovery_s": 0, "namespace": namespace}
    return Ensemble(**{"names": names, **values, **changes})


def app_client(**changes: Any) -> TestClient:
    """A client of an app with these settings changed; the app runs while the client is entered."""
    settings = GatewaySettings(
        **{
            "ensembles": (ensemble("privmix", "clinic"),),
            "namespace": NOBODY,
            "max_body_bytes": 64 * 1024,
            "max_n": 4,
            "max_prompts": 4,
            "max_tokens": 256,
            "health_timeout_s": 1.0,
            "statement_timeout_s": 1.0,
            **changes,
        }
    )
    return TestClient(build_app(settings, Models(settings)))


@pytest.fixture
def make_client() -> Iterator[MakeClient]:
    """A client of an app with these settings changed."""
    with ExitStack() as running:
        yield lambda **changes: running.enter_context(app_client(**changes))


@pytest.fixture(scope="session")
def client() -> Iterator[TestClient]:
    with app_client() as entered:
        yield entered
