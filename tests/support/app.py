"""Provides the gateway's app without other actors: a request that passes every check ends with 503."""

from collections.abc import Callable, Sequence
from typing import Any

from starlette.testclient import TestClient

from privmix.coordinator.settings import StepSettings
from privmix.gateway.app import build_app
from privmix.gateway.served_model import ServedModel
from privmix.gateway.settings import RequestSettings, ServedEnsemble
from privmix.keys.records import Secret
from privmix.training import public_model

NOBODY = "a-namespace-without-actors"

MakeClient = Callable[..., TestClient]


def _ensemble(*names: str) -> ServedEnsemble:
    """Describes an ensemble whose actors do not exist. Its limits are the defaults of the configuration."""
    limits = StepSettings()
    return ServedEnsemble(
        names=names,
        namespace=f"{NOBODY}.{names[0]}",
        model=public_model.resolve(),
        context_length=512,
        coordinators=("coordinator",),
        capacity=limits.max_live,
        max_waiting=limits.max_waiting,
        recovery_s=0,
        stall_timeout_s=limits.recovery_s + 2 * limits.step_timeout_s,
    )


def app_client(api_keys: Sequence[str] = (), **changes: Any) -> TestClient:
    """Returns a client of an app with changed settings. The app runs while the client's context is open."""
    settings = RequestSettings(
        **{
            "ensemble": _ensemble("privmix", "clinic"),
            "max_body_bytes": 64 * 1024,
            "max_n": 4,
            "max_prompts": 4,
            "max_tokens": 256,
            "api_key_hashes": tuple(Secret(key).hash for key in api_keys),
            **changes,
        }
    )
    return TestClient(build_app(settings, ServedModel.of(settings.ensemble)), base_url="http://localhost:8000")
