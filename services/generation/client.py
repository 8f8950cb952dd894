"""Implements the HTTP client of a job: it reads the privacy statement and streams texts.

It uses OpenAI's `/v1/completions` with `stream`, so that the delivered tokens are known before a text is complete.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

import httpx

from services.errors import BudgetEndedError, GenerationError, InputError, StreamBrokenError

RecordSchema = Mapping[str, Any]

_TIMEOUT = httpx.Timeout(300.0, connect=10.0)
_ATTEMPTS = 8
_LONGEST_WAIT_S = 30.0


class _TransientError(Exception):
    """A temporary failure. `wait_s` is the delay that the service requests, if it does."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


@dataclass(frozen=True)
class Sampling:
    """Holds the sampling options of a text, with the meaning of OpenAI's fields of the same names."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise InputError(f"max-tokens: must be at least 1, not {self.max_tokens}")
        if not 0 < self.temperature <= 2:
            raise InputError(f"temperature: must be above 0 and at most 2, not {self.temperature:g}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top-p: must be above 0 and at most 1, not {self.top_p:g}")
        if len(self.stop) > 4 or not all(self.stop):
            raise InputError("stop: at most 4 texts, none of them empty")


@dataclass(frozen=True)
class StreamedPiece:
    """Holds a piece of a streamed text. The last one has a `finish_reason`.

    Attributes:
        tokens: the number of the request's tokens so far.
        free: how many of these had no alternative under the schema and cost nothing.
    """

    text: str
    tokens: int
    free: int = 0
    finish_reason: str | None = None
    ended_by: str | None = None
    answered_by: str | None = None


class ServiceClient:
    """Connects to one service. Use it as an asynchronous context manager."""

    def __init__(self, url: str, key: str | None, model: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._wanted = model
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            self._client = httpx.AsyncClient(base_url=self._url, headers=headers, timeout=_TIMEOUT)
        except (httpx.InvalidURL, ValueError) as error:
            raise InputError(f"url: {url!r} is not a URL: {error}") from error
        self.model = ""
        self.context_length: int | None = None

    async def __aenter__(self) -> Self:
        """Connects and chooses the model.

        Raises:
            InputError: no service answers, it refuses the key, or it does not serve the model.
        """
        await self._client.__aenter__()
        try:
            models = {model["id"]: model for model in (await self._get("/v1/models"))["data"]}
            if self._wanted is not None and self._wanted not in models:
                raise InputError(
                    f"model: {self._wanted!r} is not served at {self._url}; choose one of {', '.join(models)}"
                )
            self.model = self._wanted or next(iter(models))
            self.context_length = models[self.model].get("max_model_len")
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def privacy(self) -> dict[str, Any]:
        """Returns the statement of `/v1/privacy` for the model.

        Raises:
            InputError: the service has no such statement.
        """
        statement: dict[str, Any] = await self._get(f"/v1/privacy?model={quote(self.model)}")
        if not {"guarantee", "tokens_left", "tokens_charged"} <= statement.keys():
            raise InputError(f"url: {self._url}/v1/privacy is not a privacy statement; is this privmix?")
        return statement

    async def prompt_tokens(self, prompt: str) -> int:
        response = await self._request("POST", "/tokenize", {"model": self.model, "prompt": prompt})
        return int((await self._content(response))["count"])

    async def stream(
        self, prompt: str, sampling: Sampling, schema: RecordSchema | None = None
    ) -> AsyncIterator[StreamedPiece]:
        """Streams one text. Repeats a request that failed before its first token, because nothing was charged for it.

        Args:
            schema: a JSON Schema of the text; None allows every text.

        Raises:
            BudgetEndedError: the budget is used up. Nothing was released.
            StreamBrokenError: the stream broke off after a part of the text.
            GenerationError: the service failed or refused the request.
        """
        for attempt in range(_ATTEMPTS):
            started = False
            try:
                async for piece in self._stream(prompt, sampling, schema):
                    started = True
                    yield piece
                return
            except (_TransientError, httpx.TransportError) as error:
                message = f"the service failed: {str(error) or type(error).__name__}; run again to continue"
                if started:
                    raise StreamBrokenError(message) from error
                if attempt + 1 == _ATTEMPTS:
                    raise GenerationError(message) from error
                wait_s = error.wait_s if isinstance(error, _TransientError) else None
                await asyncio.sleep(min(_LONGEST_WAIT_S, wait_s if wait_s is not None else 0.5 * 2**attempt))

    async def _stream(
        self, prompt: str, sampling: Sampling, schema: RecordSchema | None
    ) -> AsyncIterator[StreamedPiece]:
        body: dict[str, Any] = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop),
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        if schema is not None:
            body["structured_outputs"] = {"json": schema}
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise _failure(response)
            ended = False
            async for line in _lines(response):
                if not line.startswith(b"data: "):
                    continue
                if line == b"data: [DONE]":
                    ended = True
                    break
                chunk = json.loads(line.removeprefix(b"data: "))
                if "error" in chunk:
                    raise _TransientError(chunk["error"]["message"])
                if piece := _piece(chunk):
                    yield piece
            if not ended:
                raise _TransientError("the stream broke off")

    async def _get(self, path: str) -> Any:
        return await self._content(await self._request("GET", path))

    async def _request(self, method: str, path: str, body: object = None) -> httpx.Response:
        try:
            return await self._client.request(method, path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise InputError(f"url: no service answers at {self._url}: {error or type(error).__name__}") from error

    async def _content(self, response: httpx.Response) -> Any:
        """Returns the JSON content of a response. Raises `InputError` if the service refused the request."""
        if response.status_code != 200:
            raise InputError(f"url: {self._url} answers {response.status_code}: {_message(response)}")
        try:
            return response.json()
        except ValueError as error:
            raise InputError(f"url: {self._url} does not answer in JSON; is this privmix?") from error


async def _lines(response: httpx.Response) -> AsyncIterator[bytes]:
    """Yields the lines of a stream. `httpx` would also end a line at a U+2028 or U+0085 in a text."""
    rest = b""
    async for content in response.aiter_bytes():
        *lines, rest = (rest + content).split(b"\n")
        for line in lines:
            yield line


def _piece(chunk: dict[str, Any]) -> StreamedPiece | None:
    if not chunk["choices"]:
        return None
    (choice,), privmix = chunk["choices"], chunk.get("privmix") or {}
    usage = chunk.get("usage") or {}
    tokens = usage.get("completion_tokens")
    if tokens is None:
        raise GenerationError("the service does not count tokens while it streams (continuous_usage_stats)")
    return StreamedPiece(
        choice["text"],
        tokens,
        usage.get("free_tokens") or 0,
        choice["finish_reason"],
        privmix.get("ended_by"),
        privmix.get("answered_by"),
    )


def _failure(response: httpx.Response) -> Exception:
    """Converts a refusal to the job's exception. A refused request is never charged."""
    error, message = _error(response), _message(response)
    if error.get("type") == "insufficient_quota" or error.get("code") == "privacy_budget_exhausted":
        return BudgetEndedError(f"the budget is used up: {message}")
    if response.headers.get("x-should-retry") != "false" and (
        response.status_code == 429 or response.status_code >= 500
    ):
        wait = response.headers.get("retry-after", "")
        return _TransientError(message, float(wait) if wait.isdecimal() else None)
    return GenerationError(f"the service answers {response.status_code}: {message}")


def _error(response: httpx.Response) -> dict[str, Any]:
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return {}
    return error if isinstance(error, dict) else {}


def _message(response: httpx.Response) -> str:
    return str(_error(response).get("message") or response.reason_phrase)
