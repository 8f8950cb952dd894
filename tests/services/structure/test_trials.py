"""Claim: a grammar that needs too much ends a process that does nothing else, and the next one is tried as before."""

import asyncio
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privmix.structure import trials as trying
from privmix.structure.errors import StructureError
from privmix.structure.grammar import of_json_schema
from privmix.structure.trials import MAX_DESCRIPTION, TrialError, TrialLimits, Trials, Tried
from tests.support.structure import described, running

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MANY = ["".join(random.Random(number).choices("abcdefgh", k=12)) for number in range(4000)]


def counted(trials: Trials) -> list[bytes]:
    """Returns a list to which each description is added when it is tried."""
    tried: list[bytes] = []
    try_ = trials._tried

    async def counting(request: bytes) -> Tried:
        tried.append(request)
        return await try_(request)

    trials._tried = counting  # type: ignore[method-assign]
    return tried


@pytest.mark.anyio
async def test_what_passes_is_what_the_translation_returns_and_the_rest_is_refused() -> None:
    async with running() as trials:
        tried = await trials.grammar("json", SCHEMA)
        assert tried.grammar == of_json_schema(SCHEMA)
        assert 0 < tried.memory < 1 << 20
        assert (await trials.grammar("json", json.dumps(SCHEMA))).grammar == tried.grammar
        large = await trials.grammar("choice", MANY)
        assert large.memory > tried.memory
        assert trials.most_answers(large) < trials.most_answers(tried)
        for kind, value in (("regex", "["), ("json", {"type": "rat"}), ("choice", []), ("json", {"const": 10**5000})):
            with pytest.raises(StructureError):
                await trials.grammar(kind, value)  # type: ignore[arg-type]
        with pytest.raises(StructureError, match=str(MAX_DESCRIPTION)):
            await trials.grammar("regex", "a" * MAX_DESCRIPTION)


@pytest.mark.anyio
async def test_what_cannot_be_followed_is_refused_before_an_answer(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its start is no sign of it: the engine reaches its limits after a token that was paid for."""
    (tmp_path / "sitecustomize.py").write_text("from privmix.structure import compiler\ncompiler.STATES = 100\n")
    monkeypatch.syspath_prepend(tmp_path)
    async with running() as trials:
        for kind, described in (
            ("regex", "a.{0,99}b"),
            ("json", {"type": "string", "pattern": "^(a|b).{0,99}b.{0,99}c"}),
        ):
            with pytest.raises(StructureError, match="too complex"):
                await trials.grammar(kind, described)  # type: ignore[arg-type]
        assert await trials.grammar("regex", "a.{0,9}b")


PLANTED = """
import os, time
from privmix.structure import grammar

def of_kind(kind, described, translate=grammar.of_kind):
    match described:
        case "allocate":
            kept = [bytearray(1 << 20) for _ in range(1 << 20)]
        case "compute":
            while True:
                pass
        case "sleep":
            time.sleep(3600)
        case "abort":
            os.abort()
        case "divide":
            1 / 0
    return translate(kind, described)

grammar.of_kind = of_kind
"""
"""Stands for what a defect of the translation or of the engine does."""


@pytest.mark.anyio
async def test_a_trial_that_takes_too_much_is_refused_and_the_next_one_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    async with running(TrialLimits(memory=64 << 20, cpu_s=0.2, wall_s=1, processes=1)) as trials:
        for planted in ("allocate", "compute", "sleep", "abort"):
            with pytest.raises(StructureError, match="too much memory or time"):
                await trials.grammar("regex", planted)
            assert (await trials.grammar("regex", f"{planted}d")).grammar
        with pytest.raises(TrialError, match="ZeroDivisionError"):
            await trials.grammar("regex", "divide")


@pytest.mark.anyio
async def test_a_client_whose_trials_take_long_has_one_of_the_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    async with running(TrialLimits(wall_s=1, processes=2)) as trials:
        slow = [asyncio.create_task(trials.grammar("regex", "sleep", "hers")) for _ in range(3)]
        await asyncio.sleep(0)
        assert (await trials.grammar("regex", "quick", "his")).grammar
        assert not any(task.done() for task in slow)
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)


@pytest.mark.anyio
async def test_a_process_that_ends_is_replaced() -> None:
    async with running() as trials:
        await trials.grammar("regex", "a")
        first = trials._processes
        assert first is not None
        (waiting,) = children(first.pid)
        os.kill(waiting, 9)
        await trials.grammar("regex", "b")
        assert trials._processes is first
        os.kill(first.pid, 9)
        await trials.grammar("regex", "c")
        await trials.grammar("regex", "d")


@pytest.mark.anyio
async def test_a_client_that_leaves_keeps_its_turn_until_its_trial_ends(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Or it would leave again and again, and have all processes."""
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(tmp_path)
    has_begun, begun = asyncio.Event(), trying._begun

    async def told(reader: asyncio.StreamReader) -> bool:
        has_begun.set()
        return await begun(reader)

    monkeypatch.setattr(trying, "_begun", told)
    async with running(TrialLimits(wall_s=60, processes=2)) as trials:
        left = asyncio.create_task(trials.grammar("regex", "sleep", "hers"))
        await has_begun.wait()
        left.cancel()
        again = asyncio.create_task(trials.grammar("regex", "quick", "hers"))
        assert (await trials.grammar("regex", "quick", "his")).grammar
        await asyncio.wait({left, again}, timeout=0.5)
        assert not left.done()
        assert not again.done()
        again.cancel()
    await asyncio.wait({left, again})
    assert left.cancelled()
    assert again.cancelled()


@pytest.mark.anyio
async def test_the_answer_of_a_trial_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running() as trials:
        size = len((await trials.grammar("json", SCHEMA)).grammar)
        monkeypatch.setattr(trying, "MAX_ANSWER", size // 2)
        with pytest.raises(StructureError, match="too much memory or time"):
            await trials.grammar("json", SCHEMA, "another salt")
        monkeypatch.setattr(trying, "MAX_ANSWER", 2 * size + 1000)
        assert (await trials.grammar("json", SCHEMA, "another salt")).grammar


def children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


@pytest.mark.anyio
async def test_no_process_knows_a_secret_or_outlives_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRIVMIX_PLANTED_SECRET", "sesame")
    async with running() as trials:
        await trials.grammar("regex", "a")
        assert trials._processes is not None
        processes = [trials._processes.pid, *children(trials._processes.pid)]
        assert len(processes) == 2
        for process in processes:
            assert b"sesame" not in Path(f"/proc/{process}/environ").read_bytes()
            assert Path(f"/proc/{process}/oom_score_adj").read_text().strip() == "1000"
            assert "Max core file size        0" in Path(f"/proc/{process}/limits").read_text()
    while any(Path(f"/proc/{process}").exists() and not _is_zombie(process) for process in processes):
        await asyncio.sleep(0.01)


def _is_zombie(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.anyio
async def test_the_latest_grammars_are_known_by_their_salt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trying, "MAX_KNOWN", 2)
    async with running() as trials:
        tried = counted(trials)
        for pattern in "abacab":
            await trials.grammar("regex", pattern)
        assert [json.loads(request)[1] for request in tried] == list("abcb"), "the least recently used leaves"
        await asyncio.gather(*(trials.grammar("regex", "d") for _ in range(5)))
        assert len(tried) == 5, "concurrent requests try a grammar once"
        for salt in ("hers", "hers", "his"):
            await trials.grammar("regex", "d", salt)
        assert len(tried) == 7, "a grammar is found under its own salt only"
        monkeypatch.setattr(trying, "MAX_KNOWN_BYTES", 0)
        await trials.grammar("regex", "e")
        assert list(trials._known.values()) == [await trials.grammar("regex", "e")], "its bytes are counted"


@pytest.mark.anyio
async def test_a_tokenizer_that_the_engine_cannot_read_is_named() -> None:
    for broken in ("{}", "[]", described()[0].replace('"BPE"', '"Nothing"')):
        trials = Trials(lambda broken=broken: (broken, frozenset({0})))  # type: ignore[misc]
        with pytest.raises(StructureError, match="tokenizer"):
            await trials.grammar("regex", "a")
    with pytest.raises(StructureError, match="no token that ends"):
        await Trials(lambda: (described()[0], frozenset())).grammar("regex", "a")


@pytest.mark.anyio
async def test_processes_that_do_not_start_are_no_fault_of_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    with pytest.raises(TrialError):
        await Trials(described).grammar("regex", "a")
    monkeypatch.undo()
    read: Callable[[bytes], Any] = trying._read
    with pytest.raises(TrialError, match="KeyError"):
        read(b'{"fault": "KeyError"}')
