"""A private service over HTTP, as a job asks it: what it promises, what is left, and one text as a stream.

The route is OpenAI's `/v1/completions` with `stream`, so that what was delivered is known before a text is whole.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, Self

import httpx

from services.errors import InputError, WorkError

_TIMEOUT = httpx.Timeout(300.0, connect=10.0)
_ATTEMPTS = 8
_LONGEST_WAIT_S = 30.0


class GenerationError(WorkError):
    """The job stopped; what was delivered is kept, and running it again goes on."""


class BudgetEndedError(GenerationError):
    """The privacy budget, or the key's share of it, is used up."""


class StreamBrokenError(GenerationError):
    """An answer broke off after some of it was delivered; the rest can be asked for."""


class _TransientError(Exception):
    """A failure that can pass; `wait_s` is what the service asks for, where it says."""

    def __init__(self, message: str, wait_s: float | None = None) -> None:
        super().__init__(message)
        self.wait_s = wait_s


@dataclass(frozen=True)
class Sampling:
    """How a text is sampled; what OpenAI's fields of the same names mean."""

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
class Piece:
    """Some text of an answer. `tokens` counts all of the request's so far; the last piece has a `finish_reason`."""

    text: str
    tokens: int
    finish_reason: str | None = None
    ended_by: str | None = None
    answered_by: str | None = None


class Service:
    """One service; an asynchronous context manager."""

    def __init__(self, url: str, key: str | None, model: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._wanted = model
        headers = {"authorization": f"Bearer {key}"} if key else {}
        try:
            self._client = httpx.AsyncClient(base_url=self._url, headers=headers, timeout=_TIMEOUT)
        except (httpx.InvalidURL, ValueError) as error:
            raise InputError(f"url: {url!r} is none: {error}") from error
        self.model = ""
        self.context_length: int | None = None

    async def __aenter__(self) -> Self:
        """Connect, and choose the model.

        Raises:
            InputError: there is no service, it refuses the key, or it does not serve the model.
        """
        await self._client.__aenter__()
        try:
            models = {one["id"]: one for one in (await self._get("/v1/models"))["data"]}
            if self._wanted is not None and self._wanted not in models:
                raise InputError(f"model: {self._wanted!r} is not served at {self._url}; there is {', '.join(models)}")
            self.model = self._wanted or next(iter(models))
            self.context_length = models[self.model].get("max_model_len")
        except BaseException:
            await self._client.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def privacy(self) -> dict[str, Any]:
        """The statement of `/v1/privacy`.

        Raises:
            InputError: there is none.
        """
        statement: dict[str, Any] = await self._get("/v1/privacy")
        if not {"guarantee", "tokens_left", "tokens_charged"} <= statement.keys():
            raise InputError(f"url: {self._url}/v1/privacy is no statement of a privacy budget; is this privmix?")
        return statement

    async def prompt_tokens(self, prompt: str) -> int:
        answer = await self._refused(await self._request("POST", "/tokenize", {"model": self.model, "prompt": prompt}))
        return int(answer["count"])

    async def stream(self, prompt: str, sampling: Sampling) -> AsyncIterator[Piece]:
        """One answer, piece by piece. A request that was refused or failed before it began is repeated where that can
        help; nothing was charged for it.

        Raises:
            BudgetEndedError: nothing was released, and nothing will be.
            StreamBrokenError: some of the answer was delivered.
            GenerationError: the service failed, or refused the request.
        """
        for attempt in range(_ATTEMPTS):
            begun = False
            try:
                async for piece in self._stream(prompt, sampling):
                    begun = True
                    yield piece
                return
            except (_TransientError, httpx.TransportError) as error:
                message = f"the service failed: {str(error) or type(error).__name__}; run again to go on"
                if begun:
                    raise StreamBrokenError(message) from error
                if attempt + 1 == _ATTEMPTS:
                    raise GenerationError(message) from error
                asked = error.wait_s if isinstance(error, _TransientError) else None
                await asyncio.sleep(min(_LONGEST_WAIT_S, asked if asked is not None else 0.5 * 2**attempt))

    async def _stream(self, prompt: str, sampling: Sampling) -> AsyncIterator[Piece]:
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop),
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                await response.aread()
                raise _failure(response)
            ended = False
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    ended = True
                    break
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise _TransientError(chunk["error"]["message"])
                if piece := _piece(chunk):
                    yield piece
            if not ended:
                raise _TransientError("the stream broke off")

    async def _get(self, path: str) -> Any:
        return await self._refused(await self._request("GET", path))

    async def _request(self, method: str, path: str, body: object = None) -> httpx.Response:
        try:
            return await self._client.request(method, path, json=body)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise InputError(f"url: no service answers at {self._url}: {error or type(error).__name__}") from error

    async def _refused(self, response: httpx.Response) -> Any:
        if response.status_code != 200:
            raise InputError(f"url: {self._url} answers {response.status_code}: {_message(response)}")
        try:
            return response.json()
        except ValueError as error:
            raise InputError(f"url: {self._url} does not answer in JSON; is this privmix?") from error


def _piece(chunk: dict[str, Any]) -> Piece | None:
    if not chunk["choices"]:
        return None
    (choice,), privmix = chunk["choices"], chunk.get("privmix") or {}
    tokens = (chunk.get("usage") or {}).get("completion_tokens")
    if tokens is None:
        raise GenerationError("the service does not count tokens while it streams (continuous_usage_stats)")
    return Piece(choice["text"], tokens, choice["finish_reason"], privmix.get("ended_by"), privmix.get("answered_by"))


def _failure(response: httpx.Response) -> Exception:
    """What a refusal means for the job. No request that was refused was charged."""
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
