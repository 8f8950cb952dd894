"""Opens a client of a running service for the attacks over HTTP."""

import httpx

TIMEOUT_S = 600.0
"""The time for an answer, because an attack asks for many completions at once."""


def client(url: str, api_key: str | None) -> httpx.Client:
    """Returns a client that sends the key, if any, with every request."""
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S)
