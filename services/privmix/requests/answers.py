"""Collects the answer to one request while it grows, as OpenAI's response bodies with one more object: `privmix`."""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict
from uuid import uuid4

from pydantic import BaseModel, Field

from privmix.coordinator.messages import Delta, FinishReason, Generation
from privmix.requests.errors import NO_RETRY, ApiError, budget_exhausted, generation_failed, stopping

ApiFinishReason = Literal["stop", "length"]
"""The reasons of OpenAI's API that apply. Any limit on tokens ends an answer with `length`, which clients treat as
truncated; `Privmix.ended_by` names the limit. `content_filter` would claim something about the text."""

AnsweringBase = Literal["public", "base"]
"""The model that answers at no charge: the public model, or a private base, whose training was charged."""

EndedBy = Literal["privacy_budget", "share"]


def absent(value: object) -> bool:
    return value is None


def finish_reason(reason: FinishReason | None, *, complete: bool = False) -> ApiFinishReason | None:
    """Returns OpenAI's finish reason; None while the generation continues.

    Args:
        complete: whether a structured text that a limit ended is complete, so that it is not truncated.
    """
    if reason is None:
        return None
    return "stop" if reason == "stop" or complete else "length"


def ended_by(reason: FinishReason | None) -> EndedBy | None:
    """Returns the limit of the service that ended a generation; None if there was none."""
    return reason if reason in ("privacy_budget", "share") else None


class Usage(BaseModel):
    """The numbers of tokens. `completion_tokens` counts every released token of every choice.

    Attributes:
        free_tokens: how many of these cost nothing, because the structure of the answer left no alternative or they
            complete it before a limit. Absent without a structure.
    """

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    free_tokens: int | None = Field(default=None, exclude_if=absent)


class Substituted(TypedDict, total=False):
    """Holds the parameters that replaced those of the client."""

    temperature: float
    seed: Literal["ignored"]
    stop: Literal["ignored"]


class Privmix(BaseModel):
    """Describes how an answer differs from OpenAI's. Fields that do not apply are absent.

    Attributes:
        answered_by: "public" if the public model alone generated all tokens, "base" if the private base did, and
            "mixed" if the model generated some of them.
        ended_by: the limit other than `max_tokens` that ended a choice: the privacy budget of the ensemble or the share
            of the key. A structured answer is complete then, with the `finish_reason` `stop`; others have `length`.
        temperature: the temperature that replaced a greedy request.
        seed: "ignored" if the request has a seed.
        stop: "ignored" if the request has stop strings, which would cut JSON or a choice.
    """

    answered_by: AnsweringBase | Literal["mixed"] | None = Field(default=None, exclude_if=absent)
    ended_by: EndedBy | None = Field(default=None, exclude_if=absent)
    temperature: float | None = Field(default=None, exclude_if=absent)
    seed: Literal["ignored"] | None = Field(default=None, exclude_if=absent)
    stop: Literal["ignored"] | None = Field(default=None, exclude_if=absent)


class Frame(TypedDict):
    """Holds the fields that all bodies of one answer share."""

    id: str
    created: int
    model: str


class _Body(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage | None = Field(default=None, exclude_if=absent)
    privmix: Privmix | None = Field(default=None, exclude_if=absent)


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: None = None
    finish_reason: ApiFinishReason | None


class Completion(_Body):
    """An answer to `POST /v1/completions`, or one chunk of it."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: None = None
    finish_reason: ApiFinishReason | None


class ChatCompletion(_Body):
    """A complete answer to `POST /v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = Field(default=None, exclude_if=absent)
    content: str | None = Field(default=None, exclude_if=absent)


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: None = None
    finish_reason: ApiFinishReason | None


class ChatChunk(_Body):
    """One chunk of a streamed answer to `POST /v1/chat/completions`."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChatChunkChoice]


class Model(BaseModel):
    """A model name. `max_model_len` is vLLM's field: the tokens of prompt and answer together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "privmix"
    root: str
    parent: None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Version(BaseModel):
    version: str


class Tokenized(BaseModel):
    """An answer to `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    """An answer to `POST /detokenize`."""

    prompt: str


@dataclass(frozen=True)
class Piece:
    """Holds the complete or new text of one choice. The last piece has the finish reason."""

    index: int
    text: str
    finish_reason: FinishReason | None = None
    complete: bool = False

    @property
    def ended(self) -> ApiFinishReason | None:
        """OpenAI's finish reason; None while the choice grows."""
        return finish_reason(self.finish_reason, complete=self.complete)


DONE = b"data: [DONE]\n\n"
"""Ends a stream that did not fail."""


def events(bodies: Iterable[BaseModel]) -> bytes:
    """Returns one event for each body, to send them in one write."""
    return b"".join(b"data: " + body.model_dump_json().encode() + b"\n\n" for body in bodies)


def error_event(failure: ApiError) -> bytes:
    """Returns the event that reports an error to OpenAI's clients during a stream."""
    return b"data: " + json.dumps(failure.body()).encode() + b"\n\n"


class Style(ABC):
    """Formats the answers of one route."""

    id_prefix: str

    @abstractmethod
    def complete(self, frame: Frame, pieces: Sequence[Piece], usage: Usage, privmix: Privmix | None) -> BaseModel:
        """Returns the body of an answer that is not streamed."""

    @abstractmethod
    def opening(self, frame: Frame, index: int) -> BaseModel | None:
        """Returns the first chunk of a choice, before its tokens; None if there is none."""

    @abstractmethod
    def chunk(self, frame: Frame, piece: Piece, privmix: Privmix | None) -> BaseModel:
        """Returns the chunk of one piece."""

    @abstractmethod
    def closing(self, frame: Frame, usage: Usage) -> BaseModel:
        """Returns the last chunk, which `stream_options.include_usage` requests."""


class CompletionStyle(Style):
    """Formats answers of `/v1/completions`. `echoes` holds the text with which each choice begins."""

    id_prefix = "cmpl-"

    def __init__(self, echoes: Sequence[str] | None) -> None:
        self._echoes = echoes

    def complete(self, frame: Frame, pieces: Sequence[Piece], usage: Usage, privmix: Privmix | None) -> Completion:
        choices = [
            CompletionChoice(
                index=piece.index,
                text=self._echo(piece.index) + piece.text,
                finish_reason=piece.ended,
            )
            for piece in pieces
        ]
        return Completion(**frame, choices=choices, usage=usage, privmix=privmix)

    def opening(self, frame: Frame, index: int) -> Completion | None:
        echo = self._echo(index)
        return self.chunk(frame, Piece(index, echo), None) if echo else None

    def chunk(self, frame: Frame, piece: Piece, privmix: Privmix | None) -> Completion:
        choice = CompletionChoice(index=piece.index, text=piece.text, finish_reason=piece.ended)
        return Completion(**frame, choices=[choice], privmix=privmix)

    def closing(self, frame: Frame, usage: Usage) -> Completion:
        return Completion(**frame, choices=[], usage=usage)

    def _echo(self, index: int) -> str:
        return self._echoes[index] if self._echoes else ""


class ChatStyle(Style):
    """Formats answers of `/v1/chat/completions`."""

    id_prefix = "chatcmpl-"

    def complete(self, frame: Frame, pieces: Sequence[Piece], usage: Usage, privmix: Privmix | None) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=piece.index,
                message=ChatMessage(content=piece.text),
                finish_reason=piece.ended,
            )
            for piece in pieces
        ]
        return ChatCompletion(**frame, choices=choices, usage=usage, privmix=privmix)

    def opening(self, frame: Frame, index: int) -> ChatChunk:
        return self._chunk(frame, index, ChatDelta(role="assistant", content=""), None, None)

    def chunk(self, frame: Frame, piece: Piece, privmix: Privmix | None) -> ChatChunk:
        delta = ChatDelta(content=piece.text or None)
        return self._chunk(frame, piece.index, delta, piece.ended, privmix)

    def closing(self, frame: Frame, usage: Usage) -> ChatChunk:
        return ChatChunk(**frame, choices=[], usage=usage)

    @staticmethod
    def _chunk(
        frame: Frame, index: int, delta: ChatDelta, reason: ApiFinishReason | None, privmix: Privmix | None
    ) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=delta, finish_reason=reason)
        return ChatChunk(**frame, choices=[choice], privmix=privmix)


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


class Answer:
    """Holds the choices of one request in the order of their generations."""

    def __init__(
        self,
        style: Style,
        model: str,
        generations: Sequence[Generation],
        prompt_tokens: int,
        substituted: Substituted | None = None,
        base: AnsweringBase = "public",
    ) -> None:
        self._style = style
        self._frame = Frame(id=style.id_prefix + uuid4().hex, created=int(time.time()), model=model)
        self._structured = any(generation.grammar is not None for generation in generations)
        self._choices = {generation.id: Choice(index) for index, generation in enumerate(generations)}
        self._prompt_tokens = prompt_tokens
        self._charged = 0
        self._sources: set[bool] = set()
        self._substituted = substituted or Substituted()
        self._base = base

    @property
    def usage(self) -> Usage:
        released = sum(choice.tokens for choice in self._choices.values())
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=released,
            total_tokens=self._prompt_tokens + released,
            free_tokens=sum(choice.free for choice in self._choices.values()) if self._structured else None,
        )

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
    def privmix(self) -> Privmix | None:
        """How this answer differs from OpenAI's so far; None if it does not."""
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
        if reasons == {"privacy_budget"} and not self.usage.completion_tokens:
            raise budget_exhausted()

    def failed(self, failure: ApiError) -> ApiError:
        """Returns the failure of this answer. Disables automatic retries if they would charge for tokens again.

        Tokens may be charged and not released: those of a shard that lost them.
        """
        if self.usage.completion_tokens or self._charged:
            failure.headers |= NO_RETRY
        return failure

    def complete(self) -> BaseModel:
        choices = self._choices.values()
        pieces = [Piece(choice.index, choice.text, choice.finish_reason, choice.complete) for choice in choices]
        return self._style.complete(self._frame, pieces, self.usage, self.privmix)

    def opening(self) -> Iterator[BaseModel]:
        """Yields the first chunks of a stream."""
        chunks = (self._style.opening(self._frame, choice.index) for choice in self._choices.values())
        return (chunk for chunk in chunks if chunk is not None)

    def chunks(self, deltas: Sequence[Delta], with_usage: bool = False) -> Iterator[BaseModel]:
        """Yields the chunks for deltas that are written together: one for each choice with new text or an end."""
        for choice, group in self._by_choice(deltas):
            piece = Piece(
                choice.index, "".join(delta.text for delta in group), group[-1].finish_reason, group[-1].complete
            )
            if piece.text or piece.finish_reason:
                chunk = self._style.chunk(self._frame, piece, self._extension(_sources(group), [piece.finish_reason]))
                yield chunk.model_copy(update={"usage": self.usage}) if with_usage else chunk

    def closing(self) -> BaseModel:
        """Returns the last chunk, with the usage."""
        return self._style.closing(self._frame, self.usage)

    def _extension(self, sources: set[bool], reasons: Sequence[FinishReason | None]) -> Privmix | None:
        """Returns None if no field applies. Substituted parameters are reported where a choice ends."""
        fields = {
            "answered_by": ("mixed" if False in sources else self._base) if True in sources else None,
            "ended_by": next(filter(None, map(ended_by, reasons)), None),
            **(self._substituted if any(reasons) else {}),
        }
        return Privmix.model_validate(fields) if any(value is not None for value in fields.values()) else None

    def _by_choice(self, deltas: Sequence[Delta]) -> Iterator[tuple[Choice, list[Delta]]]:
        by_id: dict[str, list[Delta]] = {}
        for delta in deltas:
            by_id.setdefault(delta.id, []).append(delta)
        return ((self._choices[id_], group) for id_, group in by_id.items())


def _sources(deltas: Sequence[Delta]) -> set[bool]:
    """Returns for each token that a model answered whether the base model alone did, as a set."""
    return {delta.public for delta in deltas if delta.tokens > delta.free}
