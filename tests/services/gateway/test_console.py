"""Claim: one can watch the service and try it with the console, in a real browser."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from privmix.database.service import ServiceDatabase
from privmix.keys.actor import IDENTITY_AGE_S
from privmix.keys.store import KeyStore
from tests.running import RunningService, configure_small, running

WIDTHS = {1280: "light", 390: "dark"}
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


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_console_shows_the_service_to_a_key(page: Any, tmp_path: Path) -> None:
    store = KeyStore(ServiceDatabase(tmp_path / "keys.db"))
    (_, reader), (_, secret) = store.create("reader"), store.create("clinic")
    with running(configure_small(tmp_path, privacy={"q": 1.0, "tokens": 2000})) as service:
        watch(service, page, tmp_path, reader.text)
        store.revoke("clinic")
        time.sleep(IDENTITY_AGE_S)
        assert ask(service, secret.text) == 401
        page.get_by_text("invalid api key").wait_for()


def watch(service: RunningService, page: Any, folder: Path, secret: str) -> None:
    page.goto(f"{service.base_url}/console")

    # Without a key, the page shows a dialog, which works with the keyboard alone.
    page.get_by_role("dialog", name="Use a key").wait_for()
    assert page.evaluate("document.activeElement.id") == "secret"
    page.keyboard.type(secret)
    page.keyboard.press("Enter")
    page.get_by_text("As reader").wait_for()
    until(page, "document.querySelector('#state').textContent === 'Serving'")
    assert "differential privacy" in page.inner_text("#guarantee")
    assert secret not in page.content()
    before = tokens_left(page)

    # A stream in the playground updates the chart of the budget.
    page.fill("#tokens", "120")
    page.get_by_role("button", name="Generate").click()
    until(page, "document.querySelector('#answer').textContent.length > 20")
    until(page, "Number(document.querySelector('#live').textContent) >= 1")
    until(page, "before => Number(document.querySelector('#left').textContent.replaceAll(',', '')) < before", before)
    until(page, "document.querySelector('#cost').textContent.includes('of the budget')")
    assert page.locator("#burn svg path").count() >= 2
    for width, scheme in WIDTHS.items():
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(1500)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), width
        page.screenshot(path=Path(os.environ.get("SCREENSHOTS", folder)) / f"console-{width}.png", full_page=True)


def ask(service: RunningService, secret: str) -> int:
    body = {"model": "privmix", "prompt": "The patient", "max_tokens": 5, "ignore_eos": True}
    headers = {"authorization": f"Bearer {secret}"}
    return httpx.post(f"{service.base_url}/v1/completions", json=body, headers=headers, timeout=300).status_code


def tokens_left(page: Any) -> int:
    until(page, "/^[0-9,]+$/.test(document.querySelector('#left').textContent)")
    return int(page.inner_text("#left").replace(",", ""))
