"""Claim: an operator can manage keys and watch the service with the console, in a real browser."""

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from privmix.budget.statement import AccountsStatement
from privmix.database.service import ServiceDatabase
from privmix.gateway.console import ConsoleRoutes
from privmix.keys.messages import Identity
from privmix.keys.records import SCOPES
from privmix.keys.store import KeyStore
from privmix.requests.errors import unavailable
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


class Watched:
    """Stands for a served model whose actors do not answer, except for its accounts."""

    ensemble = SimpleNamespace(names=("privmix",))

    def __init__(self, accounts: AccountsStatement) -> None:
        self.asked = 0
        self.status = self
        self._accounts = accounts

    async def accounts(self) -> AccountsStatement:
        self.asked += 1
        return self._accounts

    async def nothing(self, *_: object) -> None:
        raise unavailable("no actor answers")

    statement = shards = nothing


@pytest.mark.anyio
async def test_accounts_are_asked_for_and_shown_with_the_scope_administer_alone() -> None:
    accounts = AccountsStatement(parts=3, silent=1, least=0.0, median=0.4, most=0.9, held=0.1)
    served = Watched(accounts)
    routes = ConsoleRoutes(
        SimpleNamespace(max_tokens=8),  # type: ignore[arg-type]
        served,  # type: ignore[arg-type]
        SimpleNamespace(ask=served.nothing),  # type: ignore[arg-type]
    )
    client, operator = (Identity("1", "a", scopes, ("1",)) for scopes in (("generate", "privacy"), SCOPES))
    assert (await routes._snapshot(client)).accounts is None
    assert not served.asked, "nothing is asked for a client"
    assert (await routes._snapshot(operator)).accounts == accounts


@pytest.fixture(scope="module")
def administered(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningService, str]]:
    """Starts a service; yields it and the secret of a key with all scopes."""
    folder = tmp_path_factory.mktemp("console")
    ensemble = write_ensemble(folder / "ensemble", 2)
    _, secret = KeyStore(ServiceDatabase(folder / "keys.db")).create("root", owner="ops", scopes=SCOPES)
    engine = {"kind": "transformers", "context_length": 256}
    with running(
        configure(folder, ensemble, engine=engine, http={"max_tokens": 200}, privacy={"q": 1.0, "tokens": 2000})
    ) as service:
        yield service, secret.text


@pytest.mark.browser
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_key_is_created_used_and_revoked(administered: tuple[RunningService, str], page: Any, tmp_path: Path) -> None:
    service, root = administered
    page.goto(f"{service.base_url}/console")

    # Without a key, the page shows a dialog, which works with the keyboard alone.
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

    # A stream in the playground updates the chart of the budget.
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


def ask(service: RunningService, secret: str) -> int:
    body = {"model": "privmix", "prompt": "The patient", "max_tokens": 5, "ignore_eos": True}
    headers = {"authorization": f"Bearer {secret}"}
    return httpx.post(f"{service.base_url}/v1/completions", json=body, headers=headers, timeout=300).status_code


def tokens_left(page: Any) -> int:
    until(page, "/^[0-9,]+$/.test(document.querySelector('#left').textContent)")
    return int(page.inner_text("#left").replace(",", ""))
