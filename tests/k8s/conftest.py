"""Renders each overlay once."""

import pytest

from tests.k8s.manifests import OVERLAYS, Manifests, render


@pytest.fixture(scope="session", params=OVERLAYS)
def manifests(request: pytest.FixtureRequest) -> Manifests:
    return render(request.param)
