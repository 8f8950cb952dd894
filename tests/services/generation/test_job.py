"""Claim: a job requests every text once and keeps delivered tokens; it continues with the rest."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from privmix.foundation.errors import BudgetEndedError, GenerationError, InputError, WorkError
from privmix.foundation.json_lines import load_lines
from privmix.generation.card import COVERED, UNCOVERED, write_card
from privmix.generation.client import Sampling, ServiceClient
from privmix.generation.job import JOURNAL, OUTPUT, JobRequest, opened
from privmix.generation.template import items
from tests.services.generation.small_service import SmallService, serving

TEMPLATE = "Label: {label}"
TOKENS = 20
SCHEMA = {"type": "object", "properties": {"reason": {"enum": ["a", "b"]}}, "required": ["reason"]}
WORDS = " " + " ".join(f"w{number}" for number in range(1, TOKENS + 1))


def request(count: int = 6, tokens: int = TOKENS) -> JobRequest:
    return JobRequest(TEMPLATE, tuple(items(TEMPLATE, [{"label": "urgent", "count": count}])), Sampling(tokens))


def run(directory: Path, url: str, wanted: JobRequest, partial: bool = False) -> list[float]:
    shown: list[float] = []

    async def go() -> None:
        async with ServiceClient(url, None) as service:
            with opened(directory, wanted) as job:
                try:
                    await job.run(service, concurrency=3, partial=partial, progress=shown.append)
                finally:
                    write_card(job, await service.privacy())

    asyncio.run(go())
    return shown


def test_every_text_is_requested_and_charged_once(tmp_path: Path) -> None:
    with serving(SmallService()) as service:
        shown = run(tmp_path, service.url, request())
        assert service.charged == 6 * TOKENS
        run(tmp_path, service.url, request())  # all texts are complete
        assert (service.charged, len(service.requests)) == (6 * TOKENS, 6)
    texts = load_lines(tmp_path / OUTPUT)
    assert sorted(text["id"] for text in texts) == list(range(6))
    assert {text["text"] for text in texts} == {WORDS}
    assert {text["label"] for text in texts} == {"urgent"}
    assert (shown[0], shown[-1]) == (0.0, 1.0)


def test_a_broken_stream_is_continued(tmp_path: Path) -> None:
    with serving(SmallService(break_after=7)) as service:
        run(tmp_path, service.url, request(1))
        assert [body["max_tokens"] for body in service.requests] == [TOKENS, TOKENS - 7]
        assert service.charged == TOKENS
    assert load_lines(tmp_path / OUTPUT)[0]["text"] == WORDS
    assert json.loads((tmp_path / "card.json").read_bytes())["texts"]["continued_after_an_interruption"] == 1


@pytest.mark.parametrize(("space", "kept"), [("\u2028", "\u2028"), ("\x85", "\x85"), ("\ufffd ", " ")])
def test_a_text_has_any_whole_characters(tmp_path: Path, space: str, kept: str) -> None:
    with serving(SmallService(space=space)) as service:
        run(tmp_path, service.url, request(1))
        run(tmp_path, service.url, request(1))
        assert service.charged == TOKENS
    assert load_lines(tmp_path / OUTPUT)[0]["text"] == WORDS.replace(" ", kept)


def test_a_job_waits_only_after_a_temporary_refusal(tmp_path: Path) -> None:
    with serving(SmallService(refuse=[(429, {"retry-after": "0"}), (503, {"retry-after": "0"})])) as service:
        run(tmp_path / "passes", service.url, request(2))
        assert service.charged == 2 * TOKENS
    with serving(SmallService(refuse=[(503, {"x-should-retry": "false"})])) as service:
        with pytest.raises(GenerationError, match="answers 503: not now"):
            run(tmp_path / "stays", service.url, request(1))
        assert service.charged == 0


def test_an_insufficient_budget_is_refused_before_the_first_token(tmp_path: Path) -> None:
    with serving(SmallService(budget=90)) as service:
        with pytest.raises(InputError, match=r"^budget: 6 texts can take 120 tokens, and 90 are left.*--partial"):
            run(tmp_path, service.url, request())
        assert service.requests == []
        run(tmp_path, service.url, request(), partial=True)
        assert service.charged == 90
        with pytest.raises(InputError, match="0 are left"):
            run(tmp_path, service.url, request(), partial=True)
    texts = load_lines(tmp_path / OUTPUT)
    assert 0 < len(texts) < 6
    assert {text["text"] for text in texts} == {WORDS}  # a text that the budget cut short does not count


def test_a_text_that_the_budget_ended_is_done_if_it_is_complete(tmp_path: Path) -> None:
    with serving(SmallService(budget=5, cut="stop")) as service:
        run(tmp_path, service.url, replace(request(1), schema=SCHEMA), partial=True)
    assert [(text["tokens"], text["finish_reason"]) for text in load_lines(tmp_path / OUTPUT)] == [(5, "stop")]


def test_a_budget_exhausted_by_others_ends_the_job(tmp_path: Path) -> None:
    service = SmallService(budget=200)
    with serving(service):

        async def promised() -> dict[str, object]:
            return {"guarantee": "Small promise.", "tokens_left": 200, "tokens_charged": 0}

        service.privacy = promised  # type: ignore[method-assign]
        service.charged = 150
        with serving(service), pytest.raises(BudgetEndedError, match=r"keeps \d of 6 texts"):
            run(tmp_path, service.url, request())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda service: (service.url, request(1, tokens=5000)), "prompts: item 0 has 2 tokens"),
        (lambda service: ("http://127.0.0.1:9", request(1)), "url: no service answers"),
        (lambda service: ("nonsense", request(1)), "url:"),
        (lambda service: (f"{service.url}/elsewhere", request(1)), "elsewhere answers 404: Not Found"),
    ],
)
def test_an_impossible_request_is_refused_before_the_first_token(tmp_path: Path, change, problem: str) -> None:  # type: ignore[no-untyped-def]
    with serving(SmallService()) as service:
        url, wanted = change(service)
        with pytest.raises(InputError, match=problem):
            run(tmp_path, url, wanted)
        assert service.requests == []


def test_a_directory_keeps_to_one_request(tmp_path: Path) -> None:
    with opened(tmp_path / "job", request(2)):
        pass
    for other in (request(3), replace(request(2), schema=SCHEMA), replace(request(2), schema={})):
        with (
            pytest.raises(InputError, match="another template, prompts, schema or sampling"),
            opened(tmp_path / "job", other),
        ):
            pass
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").touch()
    with pytest.raises(InputError, match="is not empty"), opened(tmp_path / "full", request(2)):
        pass
    with (
        opened(tmp_path / "job", request(2)),
        pytest.raises(WorkError, match="another generation"),
        opened(tmp_path / "job", request(2)),
    ):
        pass


def test_a_truncated_last_record_is_removed_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path, request(1)):
        pass
    journal = tmp_path / JOURNAL
    begun = journal.read_text()
    journal.write_text(begun + '{"item": 0, "asked": "x"}\n{"item": 0, "text": " w1", "tokens": 1}\n{"item": 0, "te')
    with opened(tmp_path, request(1)) as job:
        assert (job.texts[0].text, job.texts[0].tokens, job.texts[0].asked) == (" w1", 1, 1)
    assert journal.read_text().endswith('"tokens": 1}\n')
    journal.write_text(begun + '{"item": 0, "te\n{"item": 0, "text": " w1", "tokens": 1}\n')
    with pytest.raises(GenerationError, match="is damaged"), opened(tmp_path, request(1)):
        pass


def test_the_card_of_a_service_that_promises_no_epsilon_says_so(tmp_path: Path) -> None:
    with serving(SmallService(epsilon=None)) as service:
        run(tmp_path, service.url, request(1))
    card = json.loads((tmp_path / "card.json").read_bytes())
    assert UNCOVERED in card["notes"] and COVERED not in card["notes"]
    assert card["epsilon"] is None


@pytest.mark.parametrize("kind", ["base", "public", "mixed"])
def test_answers_without_the_parts_are_named_by_their_model(tmp_path: Path, kind: str) -> None:
    whole = {"asked": "x", "text": " w1", "tokens": 1, "finish_reason": "stop"}
    with opened(tmp_path, request(3)) as job:
        for item, model in enumerate((None, kind, kind)):
            job.note({"item": item, **whole, "answered_by": model})
        card = write_card(job, {"guarantee": "A promise.", "tokens_charged": 3, "tokens_left": 0})
    assert (card["texts"]["whole"], card["texts"]["answered_without_the_parts"]) == (3, {kind: 2})


def test_an_incomplete_record_is_requested_again_from_its_beginning(tmp_path: Path) -> None:
    wanted = replace(request(1), schema=SCHEMA)
    with serving(SmallService(break_after=5)) as service:
        run(tmp_path, service.url, wanted)
        first, second = service.requests
        assert first["structured_outputs"] == second["structured_outputs"] == {"json": SCHEMA}
        assert (first["prompt"], first["max_tokens"]) == (second["prompt"], second["max_tokens"])
        assert service.charged == 5 + TOKENS
        run(tmp_path, service.url, wanted)
        assert len(service.requests) == 2, "a complete record is not requested again"
    (text,) = load_lines(tmp_path / OUTPUT)
    assert (text["text"], text["tokens"]) == (WORDS, TOKENS)
    card = json.loads((tmp_path / "card.json").read_text())
    assert card["budget"]["tokens_delivered"] == 5 + TOKENS
    assert card["schema"] == SCHEMA
