"""Claim: work is repeated after the errors that are named, with the pauses that are given, and after no others."""

import asyncio
from collections.abc import Iterator
from itertools import islice

import pytest

from privmix.foundation.retrying import pauses, repeated, repeated_in_thread


class Failing:
    """Raises errors, and then returns how often it was called."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        if self._errors:
            raise self._errors.pop(0)
        return self.calls

    async def awaited(self) -> int:
        return self()


def test_pauses_double_up_to_the_longest() -> None:
    assert list(islice(pauses(1.0, 5.0), 5)) == [1.0, 2.0, 4.0, 5.0, 5.0]
    assert list(islice(pauses(0.5), 3)) == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("blocks", [False, True])
def test_work_is_repeated_after_these_errors_alone(blocks: bool) -> None:
    def run(work: Failing, waits: Iterator[float], **options: float) -> int:
        if blocks:
            return repeated_in_thread(work, OSError, waits, log=logged.append, **options)
        return asyncio.run(repeated(work.awaited, OSError, waits, log=logged.append, **options))

    logged: list[Exception] = []
    errors = OSError("away"), TimeoutError("slow")
    waits = iter([0.0, 0.0, 1e9])
    assert run(Failing(*errors), waits) == 3
    assert logged == list(errors)
    assert next(waits) == 1e9, "one pause for each further attempt"
    with pytest.raises(ValueError, match="wrong"):
        run(Failing(ValueError("wrong")), waits)
    with pytest.raises(OSError, match="still away"):
        run(Failing(OSError("still away")), waits, patience_s=-1.0)
