"""One live generation inside the coordinator."""

import time

from services.coordinator.messages import Delta, FinishReason, Generation
from services.coordinator.text import Detokenizer, TextStream


class Sequence:
    """Context, text and end of one generation; every token that it accepts has been paid for.

    `channel` names the gateway that asked. One that is `public` is answered by the public model alone, at no charge.
    `cached` says that the shards have its context, as far as the coordinator knows.
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
            self._text.push(token)  # the client has this text; half a character or stop string is held back again

    def waited(self) -> float:
        """Seconds since this was asked last, or since the submission."""
        before, self.waiting_since = self.waiting_since, time.monotonic()
        return self.waiting_since - before

    @property
    def started(self) -> bool:
        """Whether a token was accepted."""
        return len(self.tokens) > len(self.generation.prompt)

    @property
    def remaining(self) -> int:
        """How many more tokens it can release."""
        return self.generation.max_tokens - (len(self.tokens) - len(self.generation.prompt))

    @property
    def id(self) -> str:
        return self.generation.id

    def accept(self, token: int) -> Delta:
        """Take the sampled token."""
        self.tokens = (*self.tokens, token)
        text = self._text.push(token)
        if self._text.stopped:
            self.finish_reason = "stop"
        elif not self.remaining:
            self.finish_reason = "length"
            text += self._text.finish()
        return self._delta(text, (token,))

    def end(self, reason: FinishReason, retry_after: float | None = None) -> Delta:
        """No further token will come. `retry_after` as in `Delta`."""
        self.finish_reason = reason
        return self._delta(self._text.finish(), (), retry_after)

    def _delta(self, text: str, token_ids: tuple[int, ...], retry_after: float | None = None) -> Delta:
        return Delta(self.id, text, token_ids, self.finish_reason, self.public, retry_after)
