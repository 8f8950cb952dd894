"""Provides the app of `tests/support/app.py` as fixtures."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from starlette.testclient import TestClient

from privmix.gateway.served_model import PromptTokenizer, prompts_of
from privmix.training import public_model
from tests.support.app import MakeClient, app_client


@pytest.fixture(scope="session")
def prompts() -> PromptTokenizer:
    return prompts_of(public_model.resolve())


@pytest.fixture
def make_client() -> Iterator[MakeClient]:
    """Starts apps with changed settings."""
    with ExitStack() as running:
        yield lambda **changes: running.enter_context(app_client(**changes))


@pytest.fixture(scope="session")
def client() -> Iterator[TestClient]:
    with app_client() as entered:
        yield entered
