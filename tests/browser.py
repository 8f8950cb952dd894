"""Runs a real Chromium for tests of pages."""

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# The second line prevents connections of the browser to any host except the service.
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
OPTIONS += ["--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
PATIENCE_S = 60.0


@pytest.fixture
def page() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        page.set_default_timeout(1000 * PATIENCE_S)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        yield page
        browser.close()
    assert errors == []


def until(page: Any, expression: str, argument: Any = None) -> None:
    """Waits until a JavaScript expression is true. Playwright's own wait needs `eval`, which the page forbids."""
    deadline = time.monotonic() + PATIENCE_S
    while not page.evaluate(expression, argument):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(100)
