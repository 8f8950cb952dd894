"""Claim: a gateway serves one model under its names, and refuses requests for others."""

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from privmix.gateway.models import ServedModel
from privmix.training import public_model
from tests.support.app import app_client, ensemble


@pytest.fixture
def client() -> Iterator[TestClient]:
    with app_client(ensemble=ensemble("clinic", "ward", context_length=64)) as entered:
        yield entered


def error(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_a_model_answers_to_all_of_its_names_and_to_none(client: TestClient) -> None:
    models = client.get("/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("clinic", 64), ("ward", 64)]
    assert client.get("/v1/models/ward").json()["id"] == "ward"
    long = {"prompt": [1] * 100, "max_tokens": 4}
    for named in ({"model": "clinic"}, {"model": "ward"}):
        assert error(client.post("/v1/completions", json={**named, **long})) == (400, "context_length_exceeded")
        assert client.post("/tokenize", json={**named, "prompt": "a"}).json()["max_model_len"] == 64


def test_another_model_is_not_found(client: TestClient) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}]}
    for route, body in (("v1/completions", {"prompt": "a"}), ("v1/chat/completions", chat), ("tokenize", chat)):
        assert error(client.post(f"/{route}", json={"model": "hospital", **body})) == (404, "model_not_found")
    assert error(client.get("/v1/models/hospital")) == (404, "model_not_found")


def test_health_names_the_actors_that_do_not_answer(client: TestClient) -> None:
    answer = client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "unavailable")
    assert {"coordinator", "budget"} <= set(answer.json()["missing"])


def test_a_model_without_a_tokenizer_does_not_open() -> None:
    with pytest.raises(OSError, match="nothing-here"):
        ServedModel.of(ensemble("broken", model=public_model.resolve().parent / "nothing-here"))
