"""Implements the client of a job: it reads the privacy statement and streams texts.

It uses OpenAI's `/v1/completions` with `stream`, so that the delivered tokens are known before a text is complete.
"""

from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote

from openai import APIConnectionError, APIError, APIStatusError, AsyncOpenAI, Timeout
from openai.types import Completion

from privmix.foundation.errors import BudgetEndedError, GenerationError, InputError, StreamBrokenError

RecordSchema = Mapping[str, Any]

_TIMEOUT = Timeout(300.0, connect=10.0)
_RETRIES = 7
"""How often a request that failed before its first token is repeated, unless the service says that it was charged."""


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
    """

    text: str
    tokens: int
    finish_reason: str | None = None
    ended_by: str | None = None
    answered_by: str | None = None


class ServiceClient:
    """Connects to one service. Use it as an asynchronous context manager."""

    def __init__(self, url: str, key: str | None, model: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._wanted = model
        try:
            self._client = AsyncOpenAI(
                base_url=f"{self._url}/v1", api_key=key or "none", max_retries=0, timeout=_TIMEOUT
            )
        except ValueError as error:
            raise InputError(f"url: {url!r} is not a URL: {error}") from error
        self.model = ""
        self.context_length: int | None = None

    async def __aenter__(self) -> Self:
        """Connects and chooses the model.

        Raises:
            InputError: no service answers, it refuses the key, or it does not serve the model.
        """
        try:
            models = {model["id"]: model for model in (await self._get("/models"))["data"]}
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
        """Returns the statement of `/v1/privacy` for the model.

        Raises:
            InputError: the service has no such statement.
        """
        statement = await self._get(f"/privacy?model={quote(self.model)}")
        if not {"guarantee", "tokens_left", "tokens_charged"} <= statement.keys():
            raise InputError(f"url: {self._url}/v1/privacy is not a privacy statement; is this privmix?")
        return statement

    async def prompt_tokens(self, prompt: str) -> int:
        body = {"model": self.model, "prompt": prompt}
        return int((await self._answer(self._client.post(f"{self._url}/tokenize", cast_to=object, body=body)))["count"])

    async def stream(
        self, prompt: str, sampling: Sampling, schema: RecordSchema | None = None
    ) -> AsyncIterator[StreamedPiece]:
        """Streams one text. Repeats a request that was neither answered nor charged.

        Args:
            schema: a JSON Schema of the text; None allows every text.

        Raises:
            BudgetEndedError: the budget is used up. Nothing was released.
            StreamBrokenError: the stream broke off.
            GenerationError: the service failed or refused the request.
        """
        options: dict[str, Any] = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        if schema is not None:
            options["structured_outputs"] = {"json": schema}
        try:
            chunks = await self._client.with_options(max_retries=_RETRIES).completions.create(
                model=self.model,
                prompt=prompt,
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                stop=list(sampling.stop),
                stream=True,
                extra_body=options,
            )
        except APIStatusError as error:
            raise _refusal(error) from error
        except APIConnectionError as error:
            raise GenerationError(f"the service failed: {_cause(error)}; run again to continue") from error
        async with chunks:
            try:
                async for chunk in chunks:
                    if piece := _piece(chunk):
                        yield piece
            except APIError as error:
                raise StreamBrokenError(f"the service failed: {_cause(error)}; run again to continue") from error

    async def _get(self, path: str) -> dict[str, Any]:
        return await self._answer(self._client.get(path, cast_to=object))

    async def _answer(self, request: Awaitable[object]) -> dict[str, Any]:
        """Returns the JSON content of a response. Raises `InputError` if the service refused the request."""
        try:
            content = await request
        except APIStatusError as error:
            raise InputError(f"url: {self._url} answers {error.status_code}: {_message(error)}") from error
        except APIConnectionError as error:
            raise InputError(f"url: no service answers at {self._url}: {_cause(error)}") from error
        except APIError:
            content = None  # it is not the JSON that its type promises
        if not isinstance(content, dict):
            raise InputError(f"url: {self._url} does not answer in JSON; is this privmix?")
        return content


def _piece(chunk: Completion) -> StreamedPiece | None:
    if not chunk.choices:
        return None
    (choice,), privmix = chunk.choices, (chunk.model_extra or {}).get("privmix") or {}
    if chunk.usage is None:
        raise GenerationError("the service does not count tokens while it streams (continuous_usage_stats)")
    return StreamedPiece(
        choice.text,
        chunk.usage.completion_tokens,
        choice.finish_reason,
        privmix.get("ended_by"),
        privmix.get("answered_by"),
    )


def _refusal(error: APIStatusError) -> Exception:
    """Converts a refusal to the job's exception. A refused request is never charged."""
    if error.type == "insufficient_quota" or error.code == "privacy_budget_exhausted":
        return BudgetEndedError(f"the budget is used up: {_message(error)}")
    return GenerationError(f"the service answers {error.status_code}: {_message(error)}")


def _message(error: APIStatusError) -> str:
    """Returns the message of OpenAI's form of errors, or else the reason of the status."""
    message = error.body.get("message") if isinstance(error.body, dict) else None
    return str(message or error.response.reason_phrase)


def _cause(error: APIError) -> str:
    return str(error.__cause__ or error) or type(error.__cause__).__name__
