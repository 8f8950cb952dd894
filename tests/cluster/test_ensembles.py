"""Claim: a service with two ensembles has separate models, budgets and shares behind one route."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import yaml

from privmix.budget.reader import read
from privmix.database.service import ServiceDatabase
from privmix.keys.records import SCOPES
from privmix.keys.store import KeyStore
from privmix.training.manifest import Apart, Manifest
from tests.browser import page
from tests.browser import until as in_page
from tests.ensembles import write_ensemble
from tests.running import RunningService, configure, running

__all__ = ["page"]  # a fixture

PATIENCE_S = 480

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("two")
    directories = {name: write_ensemble(folder / name, 2) for name in ("clinic", "court", "school")}
    clinic, school = (Manifest.load(directories[name]) for name in ("clinic", "school"))
    clinic = clinic.model_copy(update={"marks": "0" * 64})
    clinic.save(directories["clinic"])
    apart = Apart(ensemble=clinic.ensemble, marks="0" * 64)
    school.model_copy(update={"disjoint_from": (apart,)}).save(directories["school"])
    config = configure(
        folder,
        directories["clinic"],
        engine={"kind": "transformers", "context_length": 256},
        shards={"num_cpus": 0.1, "threads": 2},
        http={"max_tokens": 64},
    )
    values = yaml.safe_load(config.read_text())
    del values["ensemble"]
    values["ensembles"] = {
        "clinic": {"ensemble": str(directories["clinic"]), "cohort": "health", "budget": {"ledger": "ledger.db"}},
        "court": {"ensemble": str(directories["court"]), "privacy": {"epsilon": 2.0, "tokens": 500}},
    }
    config.write_text(yaml.safe_dump(values))
    KeyStore(ServiceDatabase(folder / "keys.db")).create("root", scopes=SCOPES)
    with running(config) as started:
        yield started


@pytest.fixture(scope="module")
def secret(service: RunningService) -> str:
    rotated = ask("keys", "rotate", "root", "--database", str(service.config.with_name("keys.db")), "--json")
    return json.loads(rotated.stdout)["secret"]


@pytest.fixture(scope="module")
def http(service: RunningService, secret: str) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {secret}"}
    with httpx.Client(base_url=service.base_url, headers=headers, timeout=300) as client:
        yield client


def ask(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command beside the service, like an operator."""
    command = [sys.executable, "-m", "privmix", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def complete(http: httpx.Client, model: str, tokens: int = 4) -> httpx.Response:
    body = {"model": model, "prompt": "The patient", "max_tokens": tokens, "ignore_eos": True}
    return http.post("/v1/completions", json=body)


def charged(service: RunningService, ledger: str) -> int:
    return sum(read(str(service.config.with_name(ledger))).charged.values())


def test_each_model_has_its_own_budget(service: RunningService, http: httpx.Client, secret: str) -> None:
    client = openai.OpenAI(base_url=f"{service.base_url}/v1", api_key=secret, max_retries=0, timeout=300)
    assert [model.id for model in client.models.list()] == ["clinic", "court", "health"]
    assert client.completions.create(model="clinic", prompt="The patient", max_tokens=5).model == "clinic"
    assert complete(http, "court").status_code == 200
    unknown = complete(http, "hospital")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")
    assert charged(service, "ledger.db") > 0
    assert charged(service, "court.ledger.db") > 0

    listed = http.get("/v1/privacy").json()
    assert [(each["model"], each["epsilon"]) for each in listed["data"]] == [("clinic", 8.0), ("court", 2.0)]
    assert listed["together"]["epsilon"] == 10.0
    assert listed["together"]["delta"] == 2e-5
    assert "clinic and court add up" in listed["together"]["guarantee"]
    assert http.get("/v1/privacy", params={"model": "court"}).json()["epsilon"] == 2.0


def test_a_share_of_one_model(http: httpx.Client) -> None:
    made = http.post("/v1/keys", json={"name": "team"}).json()
    assert http.put("/v1/keys/team/share", params={"model": "court"}, json={"tokens": 3}).status_code == 200
    own = {"authorization": f"Bearer {made['secret']}"}
    body = {"model": "court", "prompt": "The judge", "max_tokens": 4, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body, headers=own).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["privmix"]["ended_by"] == "share"
    assert http.post("/v1/completions", json=body, headers=own).json()["error"]["code"] == "share_exhausted"
    assert http.post("/v1/completions", json=body | {"model": "clinic"}, headers=own).status_code == 200
    account = http.get("/v1/keys/team").json()
    assert {name: each["usage"]["spent"] for name, each in account["ensembles"].items()} == {"clinic": 4, "court": 3}


def test_the_console_shows_one_and_says_what_both_promise(http: httpx.Client) -> None:
    with http.stream("GET", "/v1/console", params={"model": "court"}) as answer:
        snapshot = json.loads(next(answer.iter_lines()).removeprefix("data: "))
    assert (snapshot["model"], snapshot["ensembles"], snapshot["state"]) == ("court", ["clinic", "court"], "serving")
    assert snapshot["privacy"]["epsilon"] == 2.0
    assert "epsilon 10" in snapshot["together"]
    assert http.get("/v1/console", params={"model": "hospital"}).status_code == 404


def test_a_batch_asks_both(http: httpx.Client) -> None:
    body = {"prompt": "The patient", "max_tokens": 3, "ignore_eos": True}
    lines = [
        {"custom_id": model, "method": "POST", "url": "/v1/completions", "body": {"model": model, **body}}
        for model in ("clinic", "court", "hospital")
    ]
    content = "\n".join(map(json.dumps, lines))
    file = http.post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"}).json()["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "1h"}
    begun = http.post("/v1/batches", json=asked).json()["id"]
    done = until(lambda: http.get(f"/v1/batches/{begun}"), lambda answer: answer.json()["status"] == "completed").json()
    results = {
        result["custom_id"]: result["response"]["body"]
        for name in ("output_file_id", "error_file_id")
        for result in map(json.loads, http.get(f"/v1/files/{done[name]}/content").text.splitlines())
    }
    assert [results[model]["model"] for model in ("clinic", "court")] == ["clinic", "court"]
    assert results["hospital"]["error"]["code"] == "model_not_found"


@pytest.mark.browser
def test_the_console_switches_between_them(service: RunningService, secret: str, page: Any, tmp_path: Path) -> None:
    page.goto(f"{service.base_url}/console")
    page.get_by_role("dialog", name="Use a key").wait_for()
    page.keyboard.type(secret)
    page.keyboard.press("Enter")
    in_page(page, "document.querySelector('#spent-of').textContent === 'of epsilon 8 spent'")
    page.get_by_label("Model").first.select_option("court")
    in_page(page, "document.querySelector('#spent-of').textContent === 'of epsilon 2 spent'")
    assert "clinic and court add up: epsilon 10" in page.inner_text("#together")
    assert page.evaluate("document.querySelector('#model').value") == "court"
    for width in (1280, 390):
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_timeout(1500)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), width
        folder = Path(os.environ.get("PRIVMIX_SCREENSHOTS", tmp_path))
        page.screenshot(path=folder / f"ensembles-{width}.png", full_page=True)


def test_one_is_added_drained_and_retired_while_the_others_serve(service: RunningService, http: httpx.Client) -> None:
    directory = service.config.with_name("school")
    school = {"ensemble": str(directory), "cohort": "health", "privacy": {"epsilon": 1.0, "tokens": 100}}
    rewrite(service.config, school=school)
    with asking(http, "clinic") as others:
        added = operate(service, "add", "school", "--config", str(service.config))
        assert added["state"] == "serving"
        models = [model["id"] for model in http.get("/v1/models").json()["data"]]
        assert models == ["clinic", "court", "school", "health"]
        assert complete(http, "school").status_code == 200
        joint = http.get("/v1/privacy").json()["together"]
        assert joint["epsilon"] == 10.0, "court's 2 and the larger of clinic's 8 and school's 1"
        assert "one of clinic and school" in joint["guarantee"]
        cohort = http.get("/v1/privacy", params={"model": "health"}).json()
        assert (cohort["together"]["epsilon"], len(cohort["data"])) == (8.0, 2)
        spread = [complete(http, "health", 1) for _ in range(12)]
        assert {answer.status_code for answer in spread} == {200}
        assert {answer.json()["model"] for answer in spread} == {"health"}
        # An answer is settled after its end.
        key = until(lambda: http.get("/v1/keys/root"), lambda key: not school_usage(key)["held"])
        through_school = school_usage(key)["spent"] - 4
        assert 0 < through_school <= 12

        with stream(http, "school") as running:
            drained = operate(service, "drain", "school", *named(service))
            assert (drained["state"], drained["drained"]) == ("draining", False)
            refused = until(lambda: complete(http, "school"), lambda answer: answer.status_code == 503)
            assert refused.json()["error"]["code"] == "model_draining"
            assert int(refused.headers["retry-after"]) > 0
            assert text_of(running), "running streams end normally"
        assert "school" not in [model["id"] for model in http.get("/v1/models").json()["data"]]

        operate(service, "retire", "school", *named(service))
        assert until(lambda: complete(http, "school"), lambda answer: answer.status_code == 404)
        names = [each["ensemble"]["names"][0] for each in operate(service, "list", *named(service))]
        assert names == ["clinic", "court"]
        gone = ask("status", "--address", service.ray_address, "--namespace", f"{service.namespace}.school")
        assert "no service runs as" in gone.stderr
    assert others, "the others answered in the meantime"
    assert {answer.status_code for answer in others} == {200}
    assert charged(service, "school.ledger.db") == STREAMED + 4 + through_school, "unused tokens came back"


STREAMED = 40


def school_usage(key: httpx.Response) -> dict[str, int]:
    usage: dict[str, int] = key.json()["ensembles"]["school"]["usage"]
    return usage


def operate(service: RunningService, *arguments: str) -> Any:
    done = ask("ensembles", *arguments, "--address", service.ray_address, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def named(service: RunningService) -> tuple[str, str]:
    return "--namespace", service.namespace


def rewrite(path: Path, **ensembles: dict[str, Any]) -> None:
    values = yaml.safe_load(path.read_text())
    values["ensembles"] |= ensembles
    path.write_text(yaml.safe_dump(values))


@contextmanager
def stream(http: httpx.Client, model: str) -> Iterator[Iterator[str]]:
    """Yields a stream after its first token."""
    body = {"model": model, "prompt": "The pupil", "max_tokens": STREAMED, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        lines = answer.iter_lines()
        assert next(lines).startswith("data:")
        yield lines


def text_of(lines: Iterator[str]) -> str:
    *chunks, last = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert last == "[DONE]"
    return "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks)


@contextmanager
def asking(http: httpx.Client, model: str) -> Iterator[list[httpx.Response]]:
    """Queries a model continuously during the block, and yields the list of answers."""
    answers: list[httpx.Response] = []
    over = threading.Event()

    def go_on() -> None:
        while not over.is_set():
            answers.append(complete(http, model, 1))
            over.wait(1)

    thread = threading.Thread(target=go_on)
    thread.start()
    try:
        yield answers
    finally:
        over.set()
        thread.join()


def until(look: Callable[[], httpx.Response], true: Callable[[httpx.Response], bool]) -> httpx.Response:
    deadline = time.monotonic() + PATIENCE_S
    while not true(answer := look()):
        assert time.monotonic() < deadline, answer.text
        time.sleep(0.2)
    return answer
