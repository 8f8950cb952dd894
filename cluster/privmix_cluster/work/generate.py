"""Does the work of `privmix generate`."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from privmix.foundation.errors import InputError
from privmix.foundation.ray_session import connected
from privmix.generation.card import MARKDOWN_FILE, write_card
from privmix.generation.client import ServiceClient
from privmix.generation.job import OUTPUT, GenerationJob, Progress
from privmix_cluster.configuration import Configuration
from privmix_cluster.foreground import stop
from privmix_cluster.launch import launch
from privmix_cluster.steps import Steps

_LINE_S = 10.0


@contextmanager
def serving(url: str | None, key: str | None, configuration: Configuration | None) -> Iterator[tuple[str, str | None]]:
    """Yields the address and the key of a running service, or of one started for this job."""
    if url is not None:
        yield url, key
        return
    assert configuration is not None
    steps = Steps()
    steps("Starting Ray")
    with connected():
        service = launch(configuration, steps)
        try:
            keys = configuration.http.api_keys
            yield service.url, key or (keys[0].get_secret_value() if keys else None)
        finally:
            stop(service, steps)


async def run_job(
    job: GenerationJob,
    url: str,
    key: str | None,
    model: str | None,
    concurrency: int,
    partial: bool,
    progress: Callable[[Progress], None],
    base_model: str | None,
) -> dict[str, Any]:
    async with ServiceClient(url, key, model) as service:
        try:
            statement = await job.run(service, concurrency=concurrency, partial=partial, progress=progress)
        except BaseException:
            if job.done:
                with suppress(InputError):  # the service can be gone; job.json has its last statement
                    write_card(job, await service.privacy(), base_model)
            raise
    return write_card(job, statement, base_model)


class Shown:
    """Shows progress and budget: a bar on a terminal, otherwise a line every ten seconds."""

    def __init__(self, items: int, as_json: bool) -> None:
        self._items = items
        self._bars: Bars | None = None
        self._next = 0.0
        if sys.stderr.isatty() and not as_json:
            from rich.console import Console

            self._bars = Bars(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[budget]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bars.add_task("texts", total=items, budget="")

    def texts(self, progress: Progress) -> None:
        left = "no limit" if progress.tokens_left is None else f"{progress.tokens_left:,} left"
        self._show(progress.done, f"{progress.tokens:,} tokens, {left}")

    def _show(self, done: int, budget: str) -> None:
        if self._bars is not None:
            self._bars.update(self._task, completed=done, budget=budget)
        elif done == self._items or time.monotonic() >= self._next:
            self._next = time.monotonic() + _LINE_S
            print(f"{done} of {self._items} texts, {budget}", file=sys.stderr, flush=True)

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()


def report_job(output: Path, card: dict[str, Any], seconds: float, as_json: bool) -> None:
    texts, budget = card.get("texts", {}), card.get("budget", {})
    if as_json:
        summary = {
            "output": str(output / OUTPUT),
            "complete": texts.get("whole") == texts.get("asked_for"),
            "seconds": round(seconds, 1),
            "card": card,
        }
        print(json.dumps(summary))
        return
    print(f"{output / OUTPUT}: {texts['whole']} of {texts['asked_for']} texts, in {seconds:.0f} s")
    if "schema" in card:
        charged = budget["tokens_delivered"] - budget["tokens_free"]
        print(f"{charged:,} tokens charged, {budget['tokens_free']:,} free")
    print(f"{budget['tokens_delivered']:,} tokens delivered; the card is {output / MARKDOWN_FILE}")
    print(card["guarantee"])
