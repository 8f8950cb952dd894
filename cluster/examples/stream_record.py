"""Streams a record that follows a schema; tells a spent budget from other errors: `python stream_record.py [URL]`."""

import sys

from openai import OpenAI, RateLimitError

TICKET: dict[str, object] = {
    "type": "object",
    "properties": {"reason": {"enum": ["a sore throat", "a flu shot"]}, "urgent": {"type": "boolean"}},
    "required": ["reason", "urgent"],
}

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
try:
    for chunk in client.chat.completions.create(
        model="privmix",
        messages=[{"role": "user", "content": "Caller: Hello, my throat hurts."}],
        max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "ticket", "schema": TICKET}},
        stream=True,
        stream_options={"include_usage": True},
    ):
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:  # tokens that the schema leaves no choice for are free
            usage = chunk.usage.model_dump()
            print(f"\n{usage['completion_tokens']} tokens, {usage['free_tokens']} of them free")
except RateLimitError as error:
    sys.exit(f"refused: {error}")
