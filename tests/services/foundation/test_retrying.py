"""Claim: work is repeated after the errors that are named, until the patience ends, and after no others."""

import asyncio

import pytest

from privmix.foundation.retrying import repeated


def test_work_is_repeated_after_these_errors_alone() -> None:
    def run(*errors: Exception, patience_s: float = 60.0) -> int:
        waiting, calls = list(errors), []

        async def work() -> int:
            calls.append(1)
            if waiting:
                raise waiting.pop(0)
            return len(calls)

        return asyncio.run(repeated(work, OSError, 0.0, patience_s=patience_s, log=logged.append))

    logged: list[Exception] = []
    errors = OSError("away"), TimeoutError("slow")
    assert run(*errors) == 3
    assert logged == list(errors)
    with pytest.raises(ValueError, match="wrong"):
        run(ValueError("wrong"))
    with pytest.raises(OSError, match="still away"):
        run(OSError("still away"), patience_s=-1.0)
