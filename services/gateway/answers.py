"""One request's answer while it grows: what each choice has said, and what it has cost."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from uuid import uuid4

from pydantic import BaseModel

from services.coordinator.messages import Delta, FinishReason, Generation
from services.gateway.errors import NO_RETRY, ApiError, budget_exhausted, generation_failed
from services.gateway.responses import Frame, Piece, Privmix, Style, Substituted, Usage, ended_by

_ANSWERED_BY = {(True, True): "mixed", (True, False): "public", (False, True): None, (False, False): None}
"""By whether tokens came from the public model alone, and whether tokens came from the protocol."""


@dataclass
class Choice:
    """The state of one generation."""

    index: int
    text: str = ""
    tokens: int = 0
    finish_reason: FinishReason | None = None

    def hear(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.finish_reason = delta.finish_reason


class Answer:
    """The choices of one request, in the order of their generations."""

    def __init__(
        self,
        style: Style,
        model: str,
        generations: Sequence[Generation],
        prompt_tokens: int,
        substituted: Substituted | None = None,
    ) -> None:
        self._style = style
        self._frame = Frame(id=style.id_prefix + uuid4().hex, created=int(time.time()), model=model)
        self._choices = {generation.id: Choice(index) for index, generation in enumerate(generations)}
        self._prompt_tokens = prompt_tokens
        self._sources: set[bool] = set()
        self._substituted = substituted or Substituted()

    @property
    def usage(self) -> Usage:
        released = sum(choice.tokens for choice in self._choices.values())
        return Usage(
            prompt_tokens=self._prompt_tokens, completion_tokens=released, total_tokens=self._prompt_tokens + released
        )

    @property
    def counts(self) -> dict[str, str | int]:
        """For the log."""
        return {
            "privmix.answer": self._frame["id"],
            "privmix.model": self._frame["model"],
            "privmix.choices": len(self._choices),
            "privmix.prompt_tokens": self._prompt_tokens,
        }

    @property
    def privmix(self) -> Privmix | None:
        """Where this answer differs from OpenAI's, so far."""
        return self._mark(self._sources, [choice.finish_reason for choice in self._choices.values()])

    def hear(self, deltas: Sequence[Delta]) -> None:
        """Take what the coordinator released.

        Raises:
            ApiError: a generation failed; or the budget was used up before any choice had a token.
        """
        for delta in deltas:
            self._choices[delta.id].hear(delta)
        self._sources |= _sources(deltas)
        if broken := [delta for delta in deltas if delta.finish_reason in ("error", "cancelled")]:
            raise self.failed(generation_failed(broken[0].retry_after))
        reasons = {choice.finish_reason for choice in self._choices.values()}
        if reasons == {"privacy_budget"} and not self.usage.completion_tokens:
            raise budget_exhausted()

    def failed(self, failure: ApiError) -> ApiError:
        """The failure of this answer; a client that repeats it by itself would be charged for its tokens again."""
        if self.usage.completion_tokens:
            failure.headers |= NO_RETRY
        return failure

    def whole(self) -> BaseModel:
        pieces = [Piece(choice.index, choice.text, choice.finish_reason) for choice in self._choices.values()]
        return self._style.whole(self._frame, pieces, self.usage, self.privmix)

    def opening(self) -> Iterator[BaseModel]:
        """The chunks that a stream begins with."""
        chunks = (self._style.opening(self._frame, choice.index) for choice in self._choices.values())
        return (chunk for chunk in chunks if chunk is not None)

    def chunks(self, deltas: Sequence[Delta], with_usage: bool = False) -> Iterator[BaseModel]:
        """The chunks for deltas that leave together: one for each choice, none where there is nothing to say yet."""
        for choice, heard in self._by_choice(deltas):
            piece = Piece(choice.index, "".join(delta.text for delta in heard), heard[-1].finish_reason)
            if piece.text or piece.finish_reason:
                chunk = self._style.chunk(self._frame, piece, self._mark(_sources(heard), [piece.finish_reason]))
                yield chunk.model_copy(update={"usage": self.usage}) if with_usage else chunk

    def closing(self) -> BaseModel:
        return self._style.closing(self._frame, self.usage)

    def _mark(self, sources: set[bool], reasons: Sequence[FinishReason | None]) -> Privmix | None:
        """None where there is nothing to say. What was substituted is said where a choice ends."""
        marks = {
            "answered_by": _ANSWERED_BY[True in sources, False in sources],
            "ended_by": next(filter(None, map(ended_by, reasons)), None),
            **(self._substituted if any(reasons) else {}),
        }
        return Privmix.model_validate(marks) if any(value is not None for value in marks.values()) else None

    def _by_choice(self, deltas: Sequence[Delta]) -> Iterator[tuple[Choice, list[Delta]]]:
        heard: dict[str, list[Delta]] = {}
        for delta in deltas:
            heard.setdefault(delta.id, []).append(delta)
        return ((self._choices[identity], theirs) for identity, theirs in heard.items())


def _sources(deltas: Sequence[Delta]) -> set[bool]:
    """Whether the tokens came from the public model alone; both, if some did."""
    return {delta.public for delta in deltas if delta.tokens}
