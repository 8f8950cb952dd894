"""Claim: no error ends periodic work, and its log has nothing that may be private."""

import asyncio

import pytest

from privmix.foundation.errors import LedgerUnavailable
from privmix.foundation.periodic import periodically
from tests.support.waiting import becoming


def test_an_error_ends_one_round_and_the_log_names_its_type(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[Exception] = [ValueError("of a patient"), LedgerUnavailable("the disk is full")]
    rounds = 0

    async def work() -> None:
        nonlocal rounds
        rounds += 1
        if failures:
            raise failures.pop(0)

    async def run() -> None:
        working = asyncio.create_task(periodically(work, 0.001, "nothing was done"))
        await becoming(lambda: rounds >= 4)
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working

    asyncio.run(run())
    assert caplog.messages == ["nothing was done: ValueError", "nothing was done: the disk is full"]
