"""Runs asynchronous tests with asyncio alone."""

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    return "asyncio"
