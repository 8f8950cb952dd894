"""Defines OpenAI's response bodies, complete and in chunks, with one additional object: `privmix`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from pydantic import BaseModel, Field

from services.coordinator import messages

FinishReason = Literal["stop", "length"]
"""The reasons of OpenAI's API that apply. Any limit on tokens ends an answer with `length`, which clients treat as
truncated; `Privmix.ended_by` names the limit. `content_filter` would claim something about the text."""

AnsweringBase = Literal["public", "base"]
"""The model that answers at no charge: the public model, or a private base, whose training was charged."""

EndedBy = Literal["privacy_budget", "share"]


def finish_reason(reason: messages.FinishReason | None) -> FinishReason | None:
    """Returns OpenAI's finish reason; None while the generation continues."""
    if reason is None:
        return None
    return "stop" if reason == "stop" else "length"


def ended_by(reason: messages.FinishReason | None) -> EndedBy | None:
    """Returns the limit of the service that ended a generation; None if there was none."""
    return reason if reason in ("privacy_budget", "share") else None


def _absent(value: object) -> bool:
    return value is None


class Usage(BaseModel):
    """The numbers of tokens. `completion_tokens` counts every released token of every choice."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Substituted(TypedDict, total=False):
    """Holds the parameters that replaced those of the client."""

    temperature: float
    seed: Literal["ignored"]


class Privmix(BaseModel):
    """Describes how an answer differs from OpenAI's. Fields that do not apply are absent.

    Attributes:
        answered_by: "public" if the public model alone generated all tokens, "base" if the private base did, and
            "mixed" if the model generated some of them.
        ended_by: the limit other than `max_tokens` that ended a choice with the `finish_reason` `length`: the privacy
            budget of the ensemble or the share of the key.
        temperature: the temperature that replaced a greedy request.
        seed: "ignored" if the request has a seed.
    """

    answered_by: AnsweringBase | Literal["mixed"] | None = Field(default=None, exclude_if=_absent)
    ended_by: EndedBy | None = Field(default=None, exclude_if=_absent)
    temperature: float | None = Field(default=None, exclude_if=_absent)
    seed: Literal["ignored"] | None = Field(default=None, exclude_if=_absent)


class Frame(TypedDict):
    """Holds the fields that all bodies of one answer share."""

    id: str
    created: int
    model: str


class _Body(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage | None = Field(default=None, exclude_if=_absent)
    privmix: Privmix | None = Field(default=None, exclude_if=_absent)


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None


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
    finish_reason: FinishReason | None


class ChatCompletion(_Body):
    """A complete answer to `POST /v1/chat/completions`."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]


class ChatDelta(BaseModel):
    role: Literal["assistant"] | None = Field(default=None, exclude_if=_absent)
    content: str | None = Field(default=None, exclude_if=_absent)


class ChatChunkChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: None = None
    finish_reason: FinishReason | None


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
    finish_reason: messages.FinishReason | None = None


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
                finish_reason=finish_reason(piece.finish_reason),
            )
            for piece in pieces
        ]
        return Completion(**frame, choices=choices, usage=usage, privmix=privmix)

    def opening(self, frame: Frame, index: int) -> Completion | None:
        echo = self._echo(index)
        return self.chunk(frame, Piece(index, echo), None) if echo else None

    def chunk(self, frame: Frame, piece: Piece, privmix: Privmix | None) -> Completion:
        choice = CompletionChoice(index=piece.index, text=piece.text, finish_reason=finish_reason(piece.finish_reason))
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
                finish_reason=finish_reason(piece.finish_reason),
            )
            for piece in pieces
        ]
        return ChatCompletion(**frame, choices=choices, usage=usage, privmix=privmix)

    def opening(self, frame: Frame, index: int) -> ChatChunk:
        return self._chunk(frame, index, ChatDelta(role="assistant", content=""), None, None)

    def chunk(self, frame: Frame, piece: Piece, privmix: Privmix | None) -> ChatChunk:
        delta = ChatDelta(content=piece.text or None)
        return self._chunk(frame, piece.index, delta, finish_reason(piece.finish_reason), privmix)

    def closing(self, frame: Frame, usage: Usage) -> ChatChunk:
        return ChatChunk(**frame, choices=[], usage=usage)

    @staticmethod
    def _chunk(
        frame: Frame, index: int, delta: ChatDelta, reason: FinishReason | None, privmix: Privmix | None
    ) -> ChatChunk:
        choice = ChatChunkChoice(index=index, delta=delta, finish_reason=reason)
        return ChatChunk(**frame, choices=[choice], privmix=privmix)
