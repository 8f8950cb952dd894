"""Asks a running service one question, and for what its answers have spent so far: `python ask.py [URL]`."""

import sys

import httpx
from openai import OpenAI

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
client = OpenAI(base_url=f"{url}/v1", api_key="none")
answer = client.completions.create(model="privmix", prompt="Caller: Hello, I", max_tokens=12)
print(answer.choices[0].text)

privacy = httpx.get(f"{url}/v1/privacy").raise_for_status().json()
print(f"{privacy['tokens_charged']} tokens charged, {privacy['tokens_left']} left")
print(f"about epsilon {privacy['epsilon_spent']} of {privacy['epsilon']} at delta {privacy['delta']}")
