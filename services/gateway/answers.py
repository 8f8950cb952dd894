"""Collects the answer to one request while it grows: the text and the tokens of each choice."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from uuid import uuid4

from pydantic import BaseModel

from services.coordinator.messages import Delta, FinishReason, Generation
from services.gateway.errors import NO_RETRY, ApiError, budget_exhausted, generation_failed
from services.gateway.responses import AnsweringBase, Frame, Piece, Privmix, Style, Substituted, Usage, ended_by


@dataclass
class Choice:
    """Holds the state of one generation."""

    index: int
    text: str = ""
    tokens: int = 0
    finish_reason: FinishReason | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.finish_reason = delta.finish_reason


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
        self._choices = {generation.id: Choice(index) for index, generation in enumerate(generations)}
        self._prompt_tokens = prompt_tokens
        self._sources: set[bool] = set()
        self._substituted = substituted or Substituted()
        self._base = base

    @property
    def usage(self) -> Usage:
        released = sum(choice.tokens for choice in self._choices.values())
        return Usage(
            prompt_tokens=self._prompt_tokens, completion_tokens=released, total_tokens=self._prompt_tokens + released
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
        self._sources |= _sources(deltas)
        if failed := [delta for delta in deltas if delta.finish_reason in ("error", "cancelled")]:
            raise self.failed(generation_failed(failed[0].retry_after))
        reasons = {choice.finish_reason for choice in self._choices.values()}
        if reasons == {"privacy_budget"} and not self.usage.completion_tokens:
            raise budget_exhausted()

    def failed(self, failure: ApiError) -> ApiError:
        """Returns the failure of this answer. Disables automatic retries if they would charge for tokens again."""
        if self.usage.completion_tokens:
            failure.headers |= NO_RETRY
        return failure

    def complete(self) -> BaseModel:
        pieces = [Piece(choice.index, choice.text, choice.finish_reason) for choice in self._choices.values()]
        return self._style.complete(self._frame, pieces, self.usage, self.privmix)

    def opening(self) -> Iterator[BaseModel]:
        """Yields the first chunks of a stream."""
        chunks = (self._style.opening(self._frame, choice.index) for choice in self._choices.values())
        return (chunk for chunk in chunks if chunk is not None)

    def chunks(self, deltas: Sequence[Delta], with_usage: bool = False) -> Iterator[BaseModel]:
        """Yields the chunks for deltas that are written together: one for each choice with new text or an end."""
        for choice, group in self._by_choice(deltas):
            piece = Piece(choice.index, "".join(delta.text for delta in group), group[-1].finish_reason)
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
    """Returns for each token whether it came from the base model alone, as a set."""
    return {delta.public for delta in deltas if delta.tokens}
