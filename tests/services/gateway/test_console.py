"""Claim: one can watch the service and try it with the console, in a real browser."""

import os
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from privmix.database.service import ServiceDatabase
from privmix.keys.actor import IDENTITY_AGE_S
from privmix.keys.store import KeyStore
from tests.browser import page, until
from tests.ensembles import write_ensemble
from tests.running import RunningService, configure, running

WIDTHS = {1280: "light", 390: "dark"}

__all__ = ["page"]  # a fixture


def test_the_console_loads_nothing_from_other_hosts(client: TestClient) -> None:
    page = client.get("/console")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "https://" not in page.text
    assert "src=" not in page.text


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_console_shows_the_service_to_a_key(page: Any, tmp_path: Path) -> None:
    ensemble, store = write_ensemble(tmp_path / "ensemble", 2), KeyStore(ServiceDatabase(tmp_path / "keys.db"))
    (_, reader), (_, secret) = store.create("reader"), store.create("clinic")
    engine = {"kind": "transformers", "context_length": 256}
    configuration = configure(
        tmp_path, ensemble, engine=engine, http={"max_tokens": 200}, privacy={"q": 1.0, "tokens": 2000}
    )
    with running(configuration) as service:
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
