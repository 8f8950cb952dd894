"""Claim: one gateway serves several models independently, and a model that drains refuses new requests."""

from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from privmix.ensembles.records import EnsembleEntry
from privmix.gateway.app import build_app
from privmix.requests.errors import ApiError
from privmix.requests.models import Models
from privmix.requests.settings import RequestSettings
from privmix.training import public_model
from tests.support.app import NOBODY, ensemble

CLINIC, COURT = ensemble("clinic", own_shares=True), ensemble("court", own_shares=True, context_length=64)
BODY = {"prompt": "The patient", "max_tokens": 4}


@pytest.fixture
def models() -> Models:
    return Models(RequestSettings(namespace=NOBODY, ensembles=(CLINIC, COURT)))


@pytest.fixture
def client(models: Models) -> Iterator[TestClient]:
    with TestClient(
        build_app(RequestSettings(namespace=NOBODY, ensembles=()), models), base_url="http://localhost"
    ) as entered:
        yield entered


def error(response: Any) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_a_request_goes_to_the_model_that_it_names(client: TestClient) -> None:
    models = client.get("/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("clinic", 512), ("court", 64)]
    long = {"prompt": [1] * 100, "max_tokens": 4}
    assert error(client.post("/v1/completions", json={"model": "court", **long})) == (400, "context_length_exceeded")
    assert error(client.post("/v1/completions", json={"model": "clinic", **long})) == (503, "service_unavailable")
    assert error(client.post("/v1/completions", json={"model": "hospital", **BODY})) == (404, "model_not_found")
    assert client.post("/tokenize", json={"model": "court", "prompt": "a"}).json()["max_model_len"] == 64
    for path in ("/v1/models/hospital", "/v1/privacy?model=hospital"):
        assert error(client.get(path)) == (404, "model_not_found")


@pytest.fixture
def cohort() -> Models:
    members = (ensemble("ward", cohort="health", capacity=4), ensemble("surgery", cohort="health", context_length=64))
    return Models(RequestSettings(namespace=NOBODY, ensembles=(COURT, *members)))


def test_a_cohort_is_a_model_of_the_shortest_context(cohort: Models) -> None:
    with TestClient(
        build_app(RequestSettings(namespace=NOBODY, ensembles=()), cohort), base_url="http://localhost"
    ) as client:
        listed = client.get("/v1/models").json()["data"]
        assert [(model["id"], model["max_model_len"]) for model in listed] == [
            ("court", 64), ("ward", 512), ("surgery", 64), ("health", 64)
        ]  # fmt: skip
        assert error(client.post("/v1/completions", json={"model": "health", **BODY})) == (503, "service_unavailable")
        for member in cohort.members("health"):
            member.state = "draining"
        assert error(client.post("/v1/completions", json={"model": "health", **BODY})) == (503, "model_draining")
        assert "health" not in [model["id"] for model in client.get("/v1/models").json()["data"]]


@pytest.mark.anyio
async def test_a_request_to_a_cohort_goes_to_the_least_loaded_with_budget_left(cohort: Models) -> None:
    async with cohort.running():
        ward, surgery = cohort.members("health")
        assert {cohort.named("health").ensemble.name for _ in range(64)} == {"ward", "surgery"}
        with ward.request():
            assert {cohort.named("health") for _ in range(16)} == {surgery}
            surgery.exhausted = True
            assert {cohort.named("health") for _ in range(16)} == {ward}
            ward.state = "draining"
            assert {cohort.named("health") for _ in range(16)} == {surgery}
        assert cohort.named("court") not in (ward, surgery)


def test_health_names_the_model_whose_actors_do_not_answer(client: TestClient) -> None:
    health = client.get("/health").json()
    assert health["status"] == "unavailable"
    assert {"clinic/coordinator", "court/budget"} <= set(health["missing"])


def test_a_model_that_drains_refuses_requests_and_the_other_continues(models: Models, client: TestClient) -> None:
    models.named("court").state = "draining"
    for route, body in (("completions", BODY), ("chat/completions", {"messages": [{"role": "user", "content": "a"}]})):
        response = client.post(f"/v1/{route}", json={"model": "court", **body})
        assert error(response) == (503, "model_draining")
        assert int(response.headers["retry-after"]) > 0
        assert error(client.post(f"/v1/{route}", json={"model": "clinic", **body})) == (503, "service_unavailable")
    assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["clinic"]


def test_a_request_counts_until_it_ends(models: Models, client: TestClient) -> None:
    court = models.named("court")
    with court.request():
        court.state = "draining"
        assert court.live == 1
        with pytest.raises(ApiError, match="about to be retired"), court.request():
            pass
    assert court.live == 0


@pytest.mark.anyio
async def test_models_can_be_added_and_removed(models: Models) -> None:
    school, broken = ensemble("school"), ensemble("broken", model=public_model.resolve().parent / "nothing-here")
    async with models.running():
        clinic = models.named("clinic")
        assert await models.serve([EnsembleEntry(ensemble=CLINIC), EnsembleEntry(ensemble=school)])
        assert set(models.names) == {"clinic", "school"}
        assert models.named("clinic") is clinic, "a model that stays is not opened again"
        assert not await models.serve(
            [EnsembleEntry(ensemble=CLINIC, state="draining"), EnsembleEntry(ensemble=broken)]
        )
        assert set(models.names) == {"clinic"}, "an invalid model does not affect the others"
        assert clinic.state == "draining"
    assert not models.names
