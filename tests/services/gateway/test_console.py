"""The console as an operator uses it, in a real browser over the running service."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from services.keys.database import Database
from services.keys.records import SCOPES
from services.keys.store import KeyStore
from tests.ensembles import write_ensemble
from tests.running import RunningService, configure, running

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# The second line keeps the browser from calling anyone but the service.
OPTIONS = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
OPTIONS += ["--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
PATIENCE_S = 60.0
WIDTHS = {1280: "light", 390: "dark"}


def test_the_console_loads_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/console")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "https://" not in page.text
    assert "src=" not in page.text


@pytest.fixture(scope="module")
def administered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningService, str]]:
    """A service, and the secret of a key that may do everything."""
    folder = tmp_path_factory.mktemp("console")
    ensemble = write_ensemble(folder / "ensemble", 2)
    _, secret = KeyStore(Database(folder / "keys.db")).create("root", owner="ops", scopes=SCOPES)
    engine = {"kind": "transformers", "context_length": 256}
    with running(
        configure(folder, ensemble, engine=engine, http={"max_tokens": 200}, privacy={"q": 1.0, "tokens": 2000})
    ) as service:
        yield service, secret.text


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


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_key_is_made_used_and_revoked(administered: tuple[RunningService, str], page: Any, tmp_path: Path) -> None:
    service, root = administered
    page.goto(f"{service.base_url}/console")

    # Without a key the page asks for one; it is used by keyboard alone.
    page.get_by_role("dialog", name="Use a key").wait_for()
    assert page.evaluate("document.activeElement.id") == "secret"
    page.keyboard.type(root)
    page.keyboard.press("Enter")
    page.get_by_text("As root").wait_for()
    until(page, "document.querySelector('#state').textContent === 'Serving'")
    assert "differential privacy" in page.inner_text("#guarantee")
    before = tokens_left(page)

    page.get_by_role("button", name="Create a key").click()
    page.fill("input[name=name]", "clinic")
    page.fill("input[name=owner]", "ada")
    page.fill("input[name=tokens]", "500")
    page.get_by_role("button", name="Create", exact=True).click()
    page.get_by_role("dialog", name="The new key").wait_for()
    secret = page.inner_text("#new-secret")
    assert secret.startswith("pmx_")
    page.get_by_role("button", name="Done").click()
    row = page.get_by_role("row").filter(has_text="clinic")
    row.get_by_text("valid").wait_for()
    assert secret not in page.content()

    # A stream in the playground moves the burn-down while the page is watched.
    page.fill("#tokens", "120")
    page.get_by_role("button", name="Generate").click()
    until(page, "document.querySelector('#answer').textContent.length > 20")
    until(page, "Number(document.querySelector('#live').textContent) >= 1")
    until(page, "before => Number(document.querySelector('#left').textContent.replaceAll(',', '')) < before", before)
    until(page, "document.querySelector('#cost').textContent.includes('of the budget')")
    assert page.locator("#burn svg path").count() >= 2

    assert ask(service, secret) == 200
    until(
        page,
        """[...document.querySelectorAll('#keys tr')].some(({children: [name, , , used, share]}) =>
            name.textContent.includes('clinic') && used.textContent === '5' && share.textContent === '500')""",
    )
    for width, scheme in WIDTHS.items():
        page.emulate_media(color_scheme=scheme)
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(1500)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), width
        page.screenshot(
            path=Path(os.environ.get("PRIVMIX_SCREENSHOTS", tmp_path)) / f"console-{width}.png", full_page=True
        )
    page.set_viewport_size({"width": 1280, "height": 900})

    page.get_by_role("button", name="Revoke clinic").click()
    page.get_by_role("dialog", name="Revoke this key?").get_by_role("button", name="Revoke").click()
    row.get_by_text("revoked").wait_for()
    assert ask(service, secret) == 401
    page.get_by_text("invalid api key").wait_for()


def until(page: Any, expression: str, argument: Any = None) -> None:
    """Wait for a JavaScript expression; Playwright's own way to do so evaluates text in the page, which it forbids."""
    deadline = time.monotonic() + PATIENCE_S
    while not page.evaluate(expression, argument):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(100)


def ask(service: RunningService, secret: str) -> int:
    body = {"model": "privmix", "prompt": "The patient", "max_tokens": 5, "ignore_eos": True}
    headers = {"authorization": f"Bearer {secret}"}
    return httpx.post(f"{service.base_url}/v1/completions", json=body, headers=headers, timeout=300).status_code


def tokens_left(page: Any) -> int:
    until(page, "/^[0-9,]+$/.test(document.querySelector('#left').textContent)")
    return int(page.inner_text("#left").replace(",", ""))
