"""Tracks one live generation inside the coordinator."""

import time

from services.coordinator.messages import Delta, FinishReason, Generation
from services.coordinator.text import Detokenizer, TextStream


class Sequence:
    """Holds the context, the text and the finish reason of one generation.

    Attributes:
        channel: the channel of the gateway that submitted it.
        tokens: the whole context, prompt and output.
        public: whether the public model alone answers from now on, at no charge.
        cached: whether the shards should still hold the context in their caches.
    """

    def __init__(self, channel: str, generation: Generation, detokenizer: Detokenizer) -> None:
        self.channel = channel
        self.generation = generation
        self.tokens = (*generation.prompt, *generation.released)
        self.public = False
        self.finish_reason: FinishReason | None = None
        self.waiting_since = time.monotonic()
        self.cached = False
        self._text = TextStream(detokenizer, generation.prompt, generation.stop, ignore_eos=generation.ignore_eos)
        for token in generation.released:
            self._text.push(token)  # the client has this text; only an unfinished character or stop string is held back

    def waited(self) -> float:
        """Returns the seconds since the previous call, or since the submission, and restarts the clock."""
        previous, self.waiting_since = self.waiting_since, time.monotonic()
        return self.waiting_since - previous

    @property
    def started(self) -> bool:
        """Whether a token was accepted."""
        return len(self.tokens) > len(self.generation.prompt)

    @property
    def remaining(self) -> int:
        """The number of tokens that it may still release."""
        return self.generation.max_tokens - (len(self.tokens) - len(self.generation.prompt))

    @property
    def id(self) -> str:
        return self.generation.id

    def accept(self, token: int) -> Delta:
        """Appends a sampled token, which must be paid for, and returns the new text."""
        self.tokens = (*self.tokens, token)
        text = self._text.push(token)
        if self._text.stopped:
            self.finish_reason = "stop"
        elif not self.remaining:
            self.finish_reason = "length"
            text += self._text.finish()
        return self._delta(text, (token,))

    def end(self, reason: FinishReason, retry_after: float | None = None) -> Delta:
        """Ends the generation and returns its last delta. See `Delta.retry_after`."""
        self.finish_reason = reason
        return self._delta(self._text.finish(), (), retry_after)

    def _delta(self, text: str, token_ids: tuple[int, ...], retry_after: float | None = None) -> Delta:
        return Delta(self.id, text, token_ids, self.finish_reason, self.public, retry_after)
