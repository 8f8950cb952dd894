"""Provides the gateway's app without other actors: a request that passes every check ends with 503."""

from collections.abc import Callable, Sequence
from typing import Any

from starlette.testclient import TestClient

from privmix.gateway.app import build_app
from privmix.gateway.models import ServedModel
from privmix.gateway.settings import RequestSettings, ServedEnsemble
from privmix.keys.records import Secret
from privmix.training import public_model
from tests.served import served

NOBODY = "a-namespace-without-actors"

MakeClient = Callable[..., TestClient]


def ensemble(*names: str, **changes: Any) -> ServedEnsemble:
    """Returns an ensemble whose actors do not exist."""
    namespace = f"{NOBODY}.{names[0]}"
    values: dict[str, Any] = {"model": public_model.resolve(), "recovery_s": 0, "namespace": namespace}
    return served(*names, **{**values, **changes})


def app_client(api_keys: Sequence[str] = (), **changes: Any) -> TestClient:
    """Returns a client of an app with changed settings. The app runs while the client's context is open."""
    settings = RequestSettings(
        **{
            "ensemble": ensemble("privmix", "clinic"),
            "namespace": NOBODY,
            "max_body_bytes": 64 * 1024,
            "max_n": 4,
            "max_prompts": 4,
            "max_tokens": 256,
            "api_key_hashes": tuple(Secret(key).hash for key in api_keys),
            **changes,
        }
    )
    return TestClient(build_app(settings, ServedModel.of(settings.ensemble)), base_url="http://localhost:8000")
