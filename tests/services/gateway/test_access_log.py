"""Claim: each request has an id and one log line without private text, and unexpected errors reveal nothing."""

import json
import logging
from typing import Any

import pytest
from starlette.testclient import TestClient

from privmix.gateway.served_model import PromptTokenizer
from tests.support.app import MakeClient

SECRET = "the patient is called Wilhelmina"
COMPLETION: dict[str, Any] = {"model": "privmix", "prompt": SECRET, "user": "Wilhelmina"}


@pytest.mark.parametrize("given", [None, "", "two words", "x" * 129, "line\tbreak", "ünicode"])
def test_an_invalid_request_id_is_replaced(
    client: TestClient, caplog: pytest.LogCaptureFixture, given: str | None
) -> None:
    headers = {} if given is None else {b"x-request-id": given.encode()}
    with caplog.at_level(logging.DEBUG, "privmix"):
        for _ in range(2):
            client.get("/v1/models", headers=headers)
    ids = {vars(entry)["request_id"] for entry in written(caplog)}
    assert len(ids) == 2
    assert all(len(id_) == 32 and id_.isalnum() for id_ in ids)


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/completions", COMPLETION, 503),
        ("/v1/completions", COMPLETION | {"seed": SECRET}, 400),
        ("/v1/completions", COMPLETION | {SECRET: 1}, 400),
        ("/v1/completions", COMPLETION | {"model": SECRET}, 404),
        ("/v1/completions?q=Wilhelmina", COMPLETION, 503),
        ("/v1/Wilhelmina", COMPLETION, 404),
    ],
)
def test_one_line_for_each_request_without_text(
    client: TestClient, caplog: pytest.LogCaptureFixture, path: str, body: dict[str, Any], status: int
) -> None:
    with caplog.at_level(logging.DEBUG, "privmix"):
        client.post(path, json=body, headers={"x-request-id": "mine"})
    line = only_line(caplog)
    assert (line["request_id"], line["http.request.method"]) == ("mine", "POST")
    assert line["http.response.status_code"] == status
    assert line["privmix.seconds"] >= 0
    assert "Wilhelmina" not in caplog.text
    assert "Wilhelmina" not in str(line)


def written(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Returns the gateway's log records without those of its channels, which cannot connect here."""
    entries = (entry for entry in caplog.records if entry.name.startswith("privmix"))
    return [entry for entry in entries if entry.name != "privmix.gateway.channel"]


def only_line(caplog: pytest.LogCaptureFixture) -> dict[str, Any]:
    """Returns all fields of the gateway's only log line, as in Ray Serve's JSON."""
    (entry,) = written(caplog)
    return vars(entry)


@pytest.mark.parametrize(("secret", "key"), [("first-key", "api-key-1"), ("second-key", "api-key-2"), ("no-key", None)])
def test_a_key_is_logged_by_its_id(
    make_client: MakeClient, caplog: pytest.LogCaptureFixture, secret: str, key: str | None
) -> None:
    client = make_client(api_keys=("first-key", "second-key"))
    with caplog.at_level(logging.DEBUG, "privmix"):
        client.get("/v1/models", headers={"authorization": f"Bearer {secret}"})
    line = only_line(caplog)
    assert line["privmix.key"] == key
    assert line["http.route"] == "/v1/models"
    assert secret not in str(line)


def test_an_unexpected_error_is_a_500_and_logs_only_its_place(
    make_client: MakeClient, prompts: PromptTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The tokenizer fails with the prompt in its message."""

    class Broken:
        def tokens(self, text: str, add_special_tokens: bool) -> None:
            raise KeyError(text)

    monkeypatch.setattr(prompts, "_people", Broken())
    response = make_client().post("/v1/completions", json=COMPLETION, headers={"x-request-id": "mine"})
    assert response.status_code == 500
    error = response.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("server_error", "internal_error", None)
    assert "Wilhelmina" not in json.dumps(error) + caplog.text
    assert "failed with KeyError" in caplog.text
    assert {vars(entry)["request_id"] for entry in written(caplog)} == {"mine"}
    assert "test_access_log.py" in caplog.text
