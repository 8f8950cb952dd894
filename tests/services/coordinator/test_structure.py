"""Claim: a token without an alternative asks no model and costs nothing, and the text always follows its grammar."""

import asyncio
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
from ray.actor import ActorHandle

from privmix.budget.reading import read
from privmix.coordinator.messages import Delta, Generation
from privmix.coordinator.sequence import LiveSequence
from privmix.engine.engine import EngineSettings
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.privacy.protocols.pmixed import PMixed
from privmix.shards.shard import CONCURRENCY
from privmix.structure import grammar
from privmix.structure.errors import StructureError
from tests.ensembles import write_adapters
from tests.services.coordinator.actors import end
from tests.support.steps import RecordingShard, coordinating, reasons, shard_map, until_ended
from tests.support.structure import GRAMMARS, TICKET, matcher, vocabulary
from tests.support.texts import smollm
from tests.tiny import write_tiny_model

PARTS = 4
PROMPT = (504, 253, 260)
OPTIONS = SamplingOptions(top_k=200)
STRUCTURED = Generation("ticket", PROMPT, OPTIONS, 120, grammar=GRAMMARS["schema"])
FORCED = Generation("constant", PROMPT, OPTIONS, 120, grammar=GRAMMARS["constant"])


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineSettings, ...]:
    folder = tmp_path_factory.mktemp("structure")
    model = write_tiny_model(folder / "model")
    names = [f"part-{index:03d}" for index in range(PARTS)]
    adapters = write_adapters(folder / "parts", names, model)
    return (EngineSettings(model, "transformers", "float32", 128, adapters=adapters),)


@pytest.fixture(scope="module")
def shard(cluster: None, engines: tuple[EngineSettings, ...]) -> Iterator[ActorHandle]:
    recording = ray.remote(concurrency_groups=CONCURRENCY)(RecordingShard)
    started = recording.options(name="shard-0", num_cpus=0).remote(engines[0])
    ray.get(started.status.remote())
    yield started
    end(started)


def asked(shard: ActorHandle) -> list[dict[str, int]]:
    """Returns the number of tokens of each sequence in each call of the engine since the last call."""
    operations = ray.get(shard.operations.remote())
    rows = (operation[1] for operation in operations if operation[0] == "rows")
    return [{sequence: length for sequence, length, _ in requested} for requested in rows]


def run(
    engines: Sequence[EngineSettings], ledger: Path, *generations: Generation, **budget: Any
) -> tuple[list[Delta], int]:
    """Returns the deltas of these generations and the number of tokens that the ledger charged for them."""

    async def serve() -> list[Delta]:
        serving = shard_map(PMixed(PARTS, 0.5, 0.4), ("shard-0",))
        async with coordinating(engines, ledger, serving, **budget) as coordinator:
            await coordinator.submit("channel", generations)
            return await until_ended(coordinator, len(generations))

    deltas = asyncio.run(serve())
    return deltas, sum(read(ledger).charged.values())


def text(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_forced_tokens_ask_nothing_and_cost_nothing(
    engines: tuple[EngineSettings, ...], shard: ActorHandle, tmp_path: Path
) -> None:
    asked(shard)
    deltas, charged = run(engines, tmp_path / "ledger.db", STRUCTURED)
    jsonschema.validate(json.loads(text(deltas)), TICKET)
    assert reasons(deltas) == {"ticket": "stop"}
    tokens = tuple(token for delta in deltas for token in delta.token_ids)
    assert vocabulary().tokenizer.decode_str(list(tokens)) == text(deltas), "no end token was sampled"
    free = sum(delta.free for delta in deltas)
    calls = asked(shard)
    assert free > 15
    assert charged == len(calls) == len(tokens) - free == sum(delta.charged for delta in deltas)

    follower = matcher(GRAMMARS["schema"])
    at = 0
    for call in calls:
        at += len(follower.after(tokens[:at]).forced)
        assert call == {"ticket": len(PROMPT) + at}, "only a position with an alternative is asked"
        at += 1


def test_a_text_without_an_alternative_is_free_even_without_budget(
    engines: tuple[EngineSettings, ...], shard: ActorHandle, tmp_path: Path
) -> None:
    asked(shard)
    deltas, charged = run(engines, tmp_path / "ledger.db", FORCED, STRUCTURED, epsilon=1e-6)
    constant = [delta for delta in deltas if delta.id == "constant"]
    assert (text(constant), constant[-1].finish_reason) == ('{"a": [1, null, "é"]}', "stop")
    assert all(delta.free == delta.tokens for delta in constant)
    refused = [delta for delta in deltas if delta.id == "ticket"]
    assert refused == [Delta("ticket", "", (), "privacy_budget")], "a refused request has released nothing"
    assert (charged, asked(shard)) == (0, [])


def test_a_structured_sequence_shares_its_steps_with_others(
    engines: tuple[EngineSettings, ...], shard: ActorHandle, tmp_path: Path
) -> None:
    asked(shard)
    free_text = Generation("text", PROMPT, OPTIONS, 10, ignore_eos=True)
    deltas, charged = run(engines, tmp_path / "ledger.db", STRUCTURED, free_text)
    calls = asked(shard)
    assert [set(call) for call in calls[:4]] == [{"ticket", "text"}, {"text"}] * 2, "a mask needs the token before"
    assert charged == sum(map(len, calls)) == sum(delta.charged for delta in deltas)
    assert reasons(deltas) == {"ticket": "stop", "text": "length"}


def test_an_invalid_grammar_starts_nothing(
    engines: tuple[EngineSettings, ...], shard: ActorHandle, tmp_path: Path
) -> None:
    async def serve() -> None:
        serving = shard_map(PMixed(PARTS, 0.5, 0.4), ("shard-0",))
        async with coordinating(engines, tmp_path / "ledger.db", serving) as coordinator:
            bad = replace(FORCED, id="bad", grammar=grammar.of_regex("["))
            with pytest.raises(StructureError):
                await coordinator.submit("channel", [STRUCTURED, bad])
            assert await coordinator.load() == 0

    asyncio.run(serve())


def accepted(live: LiveSequence, token: int) -> Delta:
    return live.accept(token, live.position(token))


def begun(generation: Generation) -> tuple[LiveSequence, Delta | None]:
    live = LiveSequence("channel", generation, smollm(), matcher(generation.grammar or ""))
    return live, live.begin(live.position())


def test_a_limit_without_room_for_an_answer_and_a_stop_string_end_a_forced_run() -> None:
    for limit in (1, 3):
        _, delta = begun(replace(FORCED, max_tokens=limit))
        assert delta is not None
        assert (delta.tokens, delta.free, delta.finish_reason) == (limit, limit, "length")
    _, delta = begun(replace(FORCED, stop=("null",)))
    assert delta is not None
    assert (delta.text, delta.finish_reason) == ('{"a": [1, ', "stop")


def tokens(text: str) -> list[int]:
    return vocabulary().tokenizer.tokenize_str(text)


def paid(live: LiveSequence, token: int) -> Delta:
    """Returns what follows a token that is charged and then sampled, as the coordinator does it."""
    live.charge()
    return accepted(live, token)


CHOICE = Generation("choice", PROMPT, OPTIONS, 2, grammar=grammar.of_choice(["Yes", "Not without asking the doctor"]))


def test_a_token_after_which_no_end_fits_is_paid_for_and_left_out() -> None:
    live, delta = begun(CHOICE)
    assert delta is None
    delta = paid(live, tokens("Not")[0])
    assert delta == Delta("choice", "Yes", tuple(tokens("Yes")), "length", free=1, lost=1, complete=True)
    assert delta.charged == 1
    live, _ = begun(replace(CHOICE, max_tokens=9))
    delta = paid(live, tokens("Not")[0])
    assert (delta.text, delta.finish_reason, delta.lost) == ("Not without asking the doctor", "stop", 0)


def test_an_answer_ends_well_after_a_token_that_the_engine_does_not_admit() -> None:
    live, delta = begun(STRUCTURED)
    assert delta is None, "forced tokens wait for the first sampled one"
    delta = paid(live, tokens("x")[0])
    jsonschema.validate(json.loads(delta.text), TICKET)
    assert (delta.finish_reason, delta.complete, delta.lost) == ("length", True, 1)


def test_without_a_known_end_such_a_token_is_an_error() -> None:
    live, _ = begun(replace(STRUCTURED, max_tokens=8))
    assert paid(live, tokens("x")[0]).finish_reason == "error"


def test_an_answer_whose_budget_ends_is_completed_for_nothing() -> None:
    live, _ = begun(STRUCTURED)
    first = paid(live, tokens(' "')[0])
    last = live.end("privacy_budget")
    jsonschema.validate(json.loads(first.text + last.text), TICKET)
    assert (last.finish_reason, last.complete, last.charged) == ("privacy_budget", True, 0)
    live, _ = begun(STRUCTURED)
    assert live.end("privacy_budget") == Delta("ticket", "", (), "privacy_budget"), "nothing was released yet"


def test_an_answer_that_may_charge_few_tokens_is_completed_for_nothing() -> None:
    live, _ = begun(replace(STRUCTURED, max_charged=2))
    deltas = [paid(live, tokens(' "')[0]), paid(live, tokens("a")[0])]
    jsonschema.validate(json.loads(text(deltas)), TICKET)
    assert (deltas[-1].finish_reason, deltas[-1].complete) == ("length", True)
    assert sum(delta.charged for delta in deltas) == 2
    free_text = LiveSequence("channel", Generation("text", PROMPT, OPTIONS, 9, max_charged=1), smollm())
    assert paid(free_text, tokens("a")[0]).finish_reason == "length"
