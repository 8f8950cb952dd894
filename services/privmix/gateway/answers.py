"""Collects the answer to one request while it grows, and writes it as OpenAI's bodies with one more object: `privmix`.

`privmix` says how an answer differs from OpenAI's, and lacks what does not apply:

- `answered_by`: "public" if the public model alone generated all tokens that a model sampled, "base" if the private
  base did, whose training was charged, and "mixed" if either generated some of them;
- `ended_by`: the limit other than `max_tokens` that ended a choice, "privacy_budget" or "share". A structured answer is
  complete then, with the `finish_reason` `stop`; others have `length`;
- `temperature`: the temperature that replaced a greedy request;
- `seed`, `stop`: "ignored" if the request has a seed, or stop strings that would cut JSON or a choice.

`usage.free_tokens` counts tokens of a structured answer that cost nothing: the structure left no alternative, or they
complete the answer before a limit.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from privmix.coordinator.messages import Delta, FinishReason, Generation
from privmix.gateway.errors import NO_RETRY, ApiError, budget_exhausted, generation_failed, stopping

Json = dict[str, Any]


def to_json(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


DONE = b"data: [DONE]\n\n"
"""Ends a stream that did not fail."""


def event(body: bytes) -> bytes:
    """Returns a server-sent event."""
    return b"data: " + body + b"\n\n"


def error_event(failure: ApiError) -> bytes:
    """Returns the event that reports an error to OpenAI's clients during a stream."""
    return event(to_json(failure.body()))


class Style(ABC):
    """Says how a route writes the text of a choice.

    Attributes:
        whole, chunk: OpenAI's names of a complete body and of one chunk of a stream.
    """

    id_prefix: str
    whole: str
    chunk: str

    @abstractmethod
    def complete(self, index: int, text: str) -> Json:
        """Returns the fields of a choice that is not streamed."""

    @abstractmethod
    def opening(self, index: int) -> Json | None:
        """Returns the fields of the first chunk of a choice, before its tokens; None if there is none."""

    @abstractmethod
    def piece(self, text: str) -> Json:
        """Returns the fields of a chunk with new text."""


class CompletionStyle(Style):
    """Writes answers of `/v1/completions`. `echoes` holds the text with which each choice begins."""

    id_prefix = "cmpl-"
    whole = chunk = "text_completion"

    def __init__(self, echoes: Sequence[str] = ()) -> None:
        self._echoes = echoes

    def complete(self, index: int, text: str) -> Json:
        return {"text": self._echoes[index] + text if self._echoes else text}

    def opening(self, index: int) -> Json | None:
        return {"text": self._echoes[index]} if self._echoes and self._echoes[index] else None

    def piece(self, text: str) -> Json:
        return {"text": text}


class ChatStyle(Style):
    """Writes answers of `/v1/chat/completions`."""

    id_prefix = "chatcmpl-"
    whole = "chat.completion"
    chunk = "chat.completion.chunk"

    def complete(self, index: int, text: str) -> Json:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def opening(self, index: int) -> Json | None:
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> Json:
        return {"delta": {"content": text} if text else {}}


@dataclass
class Choice:
    """Holds the state of one generation."""

    index: int
    text: str = ""
    tokens: int = 0
    free: int = 0
    finish_reason: FinishReason | None = None
    complete: bool = False

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.free += delta.free
        self.finish_reason = delta.finish_reason
        self.complete = delta.complete

    def body(self, fields: Json) -> Json:
        """Returns the choice in a body.

        Any limit on tokens ends a text with `length`, which clients treat as truncated, unless it is complete.
        """
        if self.finish_reason is None:
            reason = None
        else:
            reason = "stop" if self.finish_reason == "stop" or self.complete else "length"
        return {"index": self.index, **fields, "logprobs": None, "finish_reason": reason}


class Answer:
    """Holds the choices of one request in the order of their generations.

    Args:
        substituted: what `privmix` says of the parameters that replaced those of the client.
        base: the model that answers at no charge: the public model, or a private base, whose training was charged.
    """

    def __init__(
        self,
        style: Style,
        model: str,
        generations: Sequence[Generation],
        prompt_tokens: int,
        substituted: Json | None = None,
        base: str = "public",
    ) -> None:
        self._style = style
        self._frame: Json = {"id": style.id_prefix + uuid4().hex, "created": int(time.time()), "model": model}
        self._structured = any(generation.grammar is not None for generation in generations)
        self._choices = {generation.id: Choice(index) for index, generation in enumerate(generations)}
        self._prompt_tokens = prompt_tokens
        self._charged = 0
        self._sources: set[bool] = set()
        self._substituted = substituted or {}
        self._base = base

    @property
    def tokens(self) -> int:
        """The number of released tokens of all choices."""
        return sum(choice.tokens for choice in self._choices.values())

    @property
    def usage(self) -> Json:
        usage = {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self.tokens,
            "total_tokens": self._prompt_tokens + self.tokens,
        }
        free = sum(choice.free for choice in self._choices.values())
        return {**usage, "free_tokens": free} if self._structured else usage

    @property
    def counts(self) -> dict[str, str | int]:
        """The attributes of this answer in the log."""
        return {
            "privmix.answer": self._frame["id"],
            "privmix.model": self._frame["model"],
            "privmix.choices": len(self._choices),
            "privmix.prompt_tokens": self._prompt_tokens,
        }

    @property
    def privmix(self) -> Json:
        """How this answer differs from OpenAI's so far; empty if it does not."""
        return self._extension(self._sources, [choice.finish_reason for choice in self._choices.values()])

    def add(self, deltas: Sequence[Delta]) -> None:
        """Adds released deltas.

        Raises:
            ApiError: a generation failed, or the budget was exhausted before any choice had a token.
        """
        for delta in deltas:
            self._choices[delta.id].add(delta)
            self._charged += delta.charged
        self._sources |= _sources(deltas)
        if failed := [delta for delta in deltas if delta.finish_reason in ("error", "cancelled")]:
            # An answer that is still read is cancelled by its coordinator alone, which stops.
            stops = failed[0].finish_reason == "cancelled"
            raise self.failed(stopping() if stops else generation_failed(failed[0].retry_after))
        reasons = {choice.finish_reason for choice in self._choices.values()}
        if reasons == {"privacy_budget"} and not self.tokens:
            raise budget_exhausted()

    def failed(self, failure: ApiError) -> ApiError:
        """Returns the failure of this answer. Disables automatic retries if they would charge for tokens again.

        Tokens may be charged and not released: those of a shard that lost them.
        """
        if self.tokens or self._charged:
            failure.headers |= NO_RETRY
        return failure

    def complete(self) -> Json:
        choices = [choice.body(self._style.complete(choice.index, choice.text)) for choice in self._choices.values()]
        return self._body(self._style.whole, choices, usage=self.usage, privmix=self.privmix)

    def opening(self) -> Iterator[Json]:
        """Yields the first chunks of a stream."""
        for index in range(len(self._choices)):
            if fields := self._style.opening(index):
                yield self._body(self._style.chunk, [Choice(index).body(fields)])

    def chunks(self, deltas: Sequence[Delta], with_usage: bool = False) -> Iterator[Json]:
        """Yields the chunks for deltas that are written together: one for each choice with new text or an end."""
        by_choice: dict[str, list[Delta]] = {}
        for delta in deltas:
            by_choice.setdefault(delta.id, []).append(delta)
        for id_, group in by_choice.items():
            piece = Choice(self._choices[id_].index)
            for delta in group:
                piece.add(delta)
            if piece.text or piece.finish_reason:
                choice = piece.body(self._style.piece(piece.text))
                privmix = self._extension(_sources(group), [piece.finish_reason])
                usage = self.usage if with_usage else {}
                yield self._body(self._style.chunk, [choice], usage=usage, privmix=privmix)

    def closing(self) -> Json:
        """Returns the last chunk, with the usage, which `stream_options.include_usage` requests."""
        return self._body(self._style.chunk, [], usage=self.usage)

    def _body(self, kind: str, choices: list[Json], **more: Json) -> Json:
        return {**self._frame, "object": kind, "choices": choices, **{key: some for key, some in more.items() if some}}

    def _extension(self, sources: set[bool], reasons: Sequence[FinishReason | None]) -> Json:
        """Returns what applies of `privmix`. Substituted parameters are reported where a choice ends."""
        extension: Json = {}
        if True in sources:
            extension["answered_by"] = "mixed" if False in sources else self._base
        if limits := [reason for reason in reasons if reason in ("privacy_budget", "share")]:
            extension["ended_by"] = limits[0]
        return {**extension, **self._substituted} if any(reasons) else extension


def _sources(deltas: Sequence[Delta]) -> set[bool]:
    """Returns for each token that a model answered whether the base model alone did, as a set."""
    return {delta.public for delta in deltas if delta.tokens > delta.free}
