"""Streams one chat answer, and tells a spent budget from other errors: `python stream_chat.py [URL]`."""

import sys

from openai import OpenAI, RateLimitError

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
question = "When does the clinic open?"
try:
    for chunk in client.chat.completions.create(
        model="privmix",
        messages=[{"role": "user", "content": question}],
        max_tokens=12,
        stream=True,
        stream_options={"include_usage": True},
    ):
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n{chunk.usage.completion_tokens} tokens charged")
except RateLimitError as error:
    sys.exit(f"refused: {error}")
