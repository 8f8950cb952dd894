"""Calls the service with `openai`: completions and chats, complete and streamed, synchronous and asynchronous.

Run as `python with_openai.py URL KEY`; prints one JSON object.
"""

import asyncio
import json
import sys
from typing import Any, Literal

import openai
from pydantic import BaseModel

URL, KEY = sys.argv[1:]
MESSAGES: Any = [{"role": "user", "content": "When does the clinic open?"}]
PARAMETERS: Any = {"model": "privmix", "max_tokens": 8}


class Ticket(BaseModel):
    reason: Literal["a sore throat", "a flu shot"]
    urgent: bool


def structured() -> dict[str, object]:
    client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=300)
    wanted: Any = {"model": "privmix", "messages": MESSAGES, "max_tokens": 100}
    parsed: Any = client.chat.completions.parse(response_format=Ticket, **wanted)
    assert isinstance(parsed.choices[0].message.parsed, Ticket)
    return {"parsed": [parsed.choices[0].finish_reason, parsed.usage.completion_tokens]}


def sync() -> dict[str, object]:
    client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=300)
    completion = client.completions.create(prompt="The patient", **PARAMETERS)
    chat = client.chat.completions.create(messages=MESSAGES, **PARAMETERS)
    pieces = list(client.completions.create(prompt="The patient", stream=True, **PARAMETERS))
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **PARAMETERS))
    return {
        "completion": [completion.choices[0].finish_reason, completion.usage.completion_tokens],
        "chat": [chat.choices[0].finish_reason, chat.usage.completion_tokens],
        "pieces": [pieces[-1].choices[0].finish_reason, len("".join(piece.choices[0].text or "" for piece in pieces))],
        "chunks": [
            chunks[-1].choices[0].finish_reason,
            len("".join(chunk.choices[0].delta.content or "" for chunk in chunks)),
        ],
    }


async def parallel() -> dict[str, object]:
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=300) as client:
        chat, stream = await asyncio.gather(
            client.chat.completions.create(messages=MESSAGES, **PARAMETERS),
            client.chat.completions.create(messages=MESSAGES, stream=True, **PARAMETERS),
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        # This helper checks every event of the stream against the package's types.
        async with client.chat.completions.stream(messages=MESSAGES, **PARAMETERS) as stream_:
            events = [event.type async for event in stream_]
            final = stream_.current_completion_snapshot
    return {
        "async chat": [chat.choices[0].finish_reason, chat.usage.completion_tokens],
        "async stream": ["-", len(text)],
        "events": ["-", events.count("chunk")],
        "followed": [final.choices[0].finish_reason, len(final.choices[0].message.content or "")],
    }


print(json.dumps(structured() | sync() | asyncio.run(parallel())))
