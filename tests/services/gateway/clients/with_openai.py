"""Calls the service (python with_openai.py URL KEY): completions and chats, streamed and not, also in parallel."""

import asyncio
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel

URL, KEY = sys.argv[1:]
MESSAGES: Any = [{"role": "user", "content": "When does the clinic open?"}]
PARAMETERS: Any = {"model": "privmix", "max_tokens": 8}
REASONS = ("stop", "length")


class Ticket(BaseModel):
    reason: Literal["a sore throat", "a flu shot"]
    urgent: bool


def sync() -> None:
    client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=300)
    wanted: Any = {"model": "privmix", "messages": MESSAGES, "max_tokens": 100}
    parsed: Any = client.chat.completions.parse(response_format=Ticket, **wanted)
    assert isinstance(parsed.choices[0].message.parsed, Ticket)
    completion = client.completions.create(prompt="The patient", **PARAMETERS)
    chat = client.chat.completions.create(messages=MESSAGES, **PARAMETERS)
    for whole in (parsed, completion, chat):
        assert whole.choices[0].finish_reason in REASONS and whole.usage.completion_tokens > 0
    pieces = list(client.completions.create(prompt="The patient", stream=True, **PARAMETERS))
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **PARAMETERS))
    assert pieces[-1].choices[0].finish_reason in REASONS and chunks[-1].choices[0].finish_reason in REASONS
    assert "".join(piece.choices[0].text or "" for piece in pieces)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


async def parallel() -> None:
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=300) as client:
        chat, stream = await asyncio.gather(
            client.chat.completions.create(messages=MESSAGES, **PARAMETERS),
            client.chat.completions.create(messages=MESSAGES, stream=True, **PARAMETERS),
        )
        assert chat.choices[0].finish_reason in REASONS and chat.usage.completion_tokens > 0
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        # This helper checks every event of the stream against the package's types.
        async with client.chat.completions.stream(messages=MESSAGES, **PARAMETERS) as followed:
            assert "chunk" in [event.type async for event in followed]
            final = followed.current_completion_snapshot.choices[0]
            assert final.finish_reason in REASONS and final.message.content


sync()
asyncio.run(parallel())
