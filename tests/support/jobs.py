"""Small jobs of synthetic text."""

import asyncio
from pathlib import Path

from privmix.generation.card import write_card
from privmix.generation.client import Sampling, ServiceClient
from privmix.generation.job import JobRequest, opened
from privmix.generation.template import items

TEMPLATE = "Label: {label}"
TOKENS = 20


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
