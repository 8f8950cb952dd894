"""Asks a service, with the `openai` client, for its privacy statement and for streams of text."""

from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from openai import APIConnectionError, APIError, APIStatusError, AsyncOpenAI, DefaultAsyncHttpxClient, Timeout
from openai.types import Completion

from privmix.foundation.errors import BudgetEndedError, GenerationError, InputError, StreamBrokenError
from privmix.foundation.urls import proxy_before

_TIMEOUT = Timeout(300.0, connect=10.0)
_RETRIES = 7
"""How often the client repeats a request that failed before its first token. It waits as long as the service says."""


@dataclass(frozen=True)
class Sampling:
    """Holds the sampling options of a text, with the meaning of OpenAI's fields of the same names."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()


class ServiceClient:
    """Connects to one service. Use it as an asynchronous context manager."""

    def __init__(self, url: str, key: str | None, model: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._wanted = model
        try:
            self._proxy = proxy_before(self._url)
            http = DefaultAsyncHttpxClient(trust_env=self._proxy is not None)
            self._client = AsyncOpenAI(
                base_url=f"{self._url}/v1",
                api_key=key or "none",
                max_retries=_RETRIES,
                timeout=_TIMEOUT,
                http_client=http,
            )
        except ImportError as error:
            raise InputError(f"url: {self._proxy} names a proxy that needs a package: {error}; or unset it") from error
        except ValueError as error:
            raise InputError(f"url: {url!r} is not a URL: {error}") from error
        self._once = self._client.with_options(max_retries=0)
        self.model = ""
        self.context_length: int | None = None

    async def __aenter__(self) -> Self:
        """Connects and chooses the model.

        Raises:
            InputError: no service answers, it refuses the key, or it does not serve the model.
        """
        try:
            models = {
                model["id"]: model for model in (await self._answer(self._once.get("/models", cast_to=object)))["data"]
            }
            if self._wanted is not None and self._wanted not in models:
                raise InputError(
                    f"model: {self._wanted!r} is not served at {self._url}; choose one of {', '.join(models)}"
                )
            self.model = self._wanted or next(iter(models))
            self.context_length = models[self.model].get("max_model_len")
        except BaseException:
            await self._client.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()

    async def privacy(self) -> dict[str, Any]:
        """Returns the statement of `/v1/privacy`.

        Raises:
            InputError: the service has no such statement.
        """
        statement = await self._answer(self._once.get("/privacy", cast_to=object))
        if not {"guarantee", "tokens_left", "tokens_charged"} <= statement.keys():
            raise InputError(f"url: {self._url}/v1/privacy is not a privacy statement; is this privmix?")
        return statement

    async def prompt_tokens(self, prompt: str) -> int:
        body = {"model": self.model, "prompt": prompt}
        return int((await self._answer(self._once.post(f"{self._url}/tokenize", cast_to=object, body=body)))["count"])

    async def stream(
        self, prompt: str, sampling: Sampling, max_tokens: int, schema: Mapping[str, Any] | None
    ) -> AsyncIterator[dict[str, Any]]:
        """Streams one text: the `text` of each piece and the number of the request's `tokens` so far.

        The last piece has a `finish_reason`, and `ended_by` if a budget ended it. A piece without the parts has
        `answered_by` (`privmix.gateway.answers`).

        Args:
            schema: a JSON Schema of the text; None allows every text.

        Raises:
            BudgetEndedError: the budget is used up. Nothing was released.
            StreamBrokenError: the stream broke off.
            GenerationError: the service failed or refused the request. A refused request is never charged.
        """
        options: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        if schema is not None:
            options["structured_outputs"] = {"json": schema}
        try:
            chunks = await self._client.completions.create(
                model=self.model,
                prompt=prompt,
                max_tokens=max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                stop=list(sampling.stop),
                stream=True,
                extra_body=options,
            )
        except APIStatusError as error:
            if error.type == "insufficient_quota":
                raise BudgetEndedError(f"the budget is used up: {_message(error)}") from error
            raise GenerationError(f"the service answers {error.status_code}: {_message(error)}") from error
        except APIConnectionError as error:
            raise GenerationError(f"the service failed: {_cause(error)}; run again to continue") from error
        async with chunks:
            try:
                async for chunk in chunks:
                    if chunk.choices:
                        yield _piece(chunk)
            except APIError as error:
                raise StreamBrokenError(f"the service failed: {_cause(error)}; run again to continue") from error

    async def _answer(self, request: Awaitable[object]) -> dict[str, Any]:
        """Returns the JSON content of a response. Raises `InputError` if the service refused the request."""
        try:
            content = await request
        except APIStatusError as error:
            raise InputError(f"url: {self._url} answers {error.status_code}: {_message(error)}") from error
        except APIConnectionError as error:
            through = f" through the proxy of {self._proxy}" if self._proxy else ""
            raise InputError(f"url: no service answers at {self._url}{through}: {_cause(error)}") from error
        except APIError:
            content = None  # it is not the JSON that its type promises
        if not isinstance(content, dict):
            raise InputError(f"url: {self._url} does not answer in JSON; is this privmix?")
        return content


def _piece(chunk: Completion) -> dict[str, Any]:
    if chunk.usage is None:
        raise GenerationError("the service does not count tokens (continuous_usage_stats); is this privmix?")
    (choice,), privmix = chunk.choices, (chunk.model_extra or {}).get("privmix") or {}
    # A model can generate bytes that are no character.
    piece = {"text": choice.text.replace("\ufffd", ""), "tokens": chunk.usage.completion_tokens}
    named = {"finish_reason": choice.finish_reason, **{name: privmix.get(name) for name in ("ended_by", "answered_by")}}
    return piece | {name: value for name, value in named.items() if value is not None}


def _message(error: APIStatusError) -> str:
    """Returns the message of OpenAI's form of errors, or else the reason of the status."""
    message = error.body.get("message") if isinstance(error.body, dict) else None
    return str(message or error.response.reason_phrase)


def _cause(error: APIError) -> str:
    return str(error.__cause__ or error) or type(error.__cause__).__name__
