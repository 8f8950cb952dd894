"""OpenAI's response bodies, whole and in chunks, with one object of our own: `privmix`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from pydantic import BaseModel, Field

from services.coordinator import messages

FinishReason = Literal["stop", "length"]
"""OpenAI's, as far as it applies. Any limit on tokens ends an answer with `length`, which clients treat as cut short.
`content_filter` would claim a finding about the text. `Privmix.ended_by` says which limit it was."""

EndedBy = Literal["privacy_budget", "share"]


def finish_reason(reason: messages.FinishReason | None) -> FinishReason | None:
    """OpenAI's word for how a generation ended; None while it goes on."""
    if reason is None:
        return None
    return "stop" if reason == "stop" else "length"


def ended_by(reason: messages.FinishReason | None) -> EndedBy | None:
    """The limit of the service that ended a generation, if one did."""
    return reason if reason in ("privacy_budget", "share") else None


def _absent(value: object) -> bool:
    return value is None


class Usage(BaseModel):
    """`completion_tokens` counts every released token of every choice."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Substituted(TypedDict, total=False):
    """What was done instead of what the client asked for."""

    temperature: float
    seed: Literal["ignored"]


class Privmix(BaseModel):
    """Where the service differs from OpenAI's; absent where there is nothing to say.

    Attributes:
        answered_by: the public model alone answered, for all tokens or for some of them.
        ended_by: the limit that ended a choice whose `finish_reason` is `length`, other than `max_tokens`: the privacy
            budget of the ensemble, or the share of it that the key has.
        temperature: what a greedy request was sampled at instead.
        seed: "ignored" where one was given.
    """

    answered_by: Literal["public", "mixed"] | None = Field(default=None, exclude_if=_absent)
    ended_by: EndedBy | None = Field(default=None, exclude_if=_absent)
    temperature: float | None = Field(default=None, exclude_if=_absent)
    seed: Literal["ignored"] | None = Field(default=None, exclude_if=_absent)


class Frame(TypedDict):
    """What all bodies of one answer have in common."""

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
    """An answer to `POST /v1/completions`, whole or one chunk of it."""

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
    """A whole answer to `POST /v1/chat/completions`."""

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
    """One served name. `max_model_len` is vLLM's field: prompt and answer together, in tokens."""

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
    """Some text of one choice: all of it, or what is new; the last has the reason why it ends."""

    index: int
    text: str
    finish_reason: messages.FinishReason | None = None


class Style(ABC):
    """How one route writes its answers."""

    id_prefix: str

    @abstractmethod
    def whole(self, frame: Frame, pieces: Sequence[Piece], usage: Usage, privmix: Privmix | None) -> BaseModel:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def opening(self, frame: Frame, index: int) -> BaseModel | None:
        """The chunk that a choice begins with, before any token of it."""

    @abstractmethod
    def chunk(self, frame: Frame, piece: Piece, privmix: Privmix | None) -> BaseModel:
        """The chunk of one piece."""

    @abstractmethod
    def closing(self, frame: Frame, usage: Usage) -> BaseModel:
        """The chunk that `stream_options.include_usage` asks for."""


class CompletionStyle(Style):
    """`/v1/completions`; `echoes` holds the text that each choice begins with."""

    id_prefix = "cmpl-"

    def __init__(self, echoes: Sequence[str] | None) -> None:
        self._echoes = echoes

    def whole(self, frame: Frame, pieces: Sequence[Piece], usage: Usage, privmix: Privmix | None) -> Completion:
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
    """`/v1/chat/completions`."""

    id_prefix = "chatcmpl-"

    def whole(self, frame: Frame, pieces: Sequence[Piece], usage: Usage, privmix: Privmix | None) -> ChatCompletion:
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
