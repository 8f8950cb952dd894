"""Claim: the quickstart's configuration answers more concurrent streams than the engine's capacity."""

import asyncio
from collections.abc import Iterator

import httpx
import openai
import pytest

from privmix_cluster.commands.quickstart import PARTS, SETTINGS
from tests.ensembles import write_ensemble
from tests.running import RunningService, configure, free_port, running, settled

PROMPT = " callers asked the clinic whether the doctor could see them on Thursday,"
PATIENCE_S = 300.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    folder = tmp_path_factory.mktemp("many-streams")
    sections = {name: section for name, section in SETTINGS.items() if name != "ensemble"}
    sections["http"] = {**SETTINGS["http"], "port": free_port()}
    with running(configure(folder, write_ensemble(folder / "ensemble", PARTS), **sections)) as service:
        yield service


async def _stream(client: openai.AsyncOpenAI, number: int, tokens: int) -> int:
    """Returns the number of tokens of a streamed answer."""
    chunks = await client.completions.create(
        model="privmix",
        prompt=f"{number}{PROMPT}",
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    released = 0
    async for chunk in chunks:
        released = chunk.usage.completion_tokens if chunk.usage else released
    return released


async def _streams(service: RunningService, number: int, tokens: int) -> list[int]:
    async with openai.AsyncOpenAI(
        base_url=f"{service.base_url}/v1", api_key="none", max_retries=0, timeout=PATIENCE_S
    ) as client:
        return await asyncio.gather(*(_stream(client, index, tokens) for index in range(number)))


@pytest.mark.parametrize(("streams", "tokens"), [(128, 4), (300, 1)])
def test_concurrent_streams_are_all_answered(service: RunningService, streams: int, tokens: int) -> None:
    before = settled(service)
    released = asyncio.run(_streams(service, streams, tokens))
    assert len(released) == streams
    assert all(1 <= count <= tokens for count in released)
    assert httpx.get(f"{service.base_url}/health", timeout=30).status_code == 200
    assert asyncio.run(_streams(service, 1, 2))[0] >= 1
    after = settled(service)
    assert 1 <= after - before - sum(released) <= 2, "only released tokens are charged"
