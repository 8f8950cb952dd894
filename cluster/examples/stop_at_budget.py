"""Asks until so many more tokens would be charged than a program may use: `python stop_at_budget.py [URL] [TOKENS]`.

The service enforces the budget of all clients. This is a limit that the program sets for itself.
"""

import sys

import httpx
from openai import OpenAI

LONGEST = 8

url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
allowed = int(sys.argv[2]) if len(sys.argv) > 2 else 64
client = OpenAI(base_url=f"{url}/v1", api_key="none")
used = 0
while used + LONGEST <= allowed:
    answer = client.completions.create(model="privmix", prompt="Caller: Hello, I", max_tokens=LONGEST)
    print(answer.choices[0].text.strip())
    used += answer.usage.completion_tokens if answer.usage else LONGEST
    left = httpx.get(f"{url}/v1/privacy").raise_for_status().json()["tokens_left"]
    print(f"{used} of {allowed} tokens used; the service has {left} left for all")
