"""Tracks one live generation inside the coordinator."""

import time
from dataclasses import replace

from privmix.coordinator.messages import Delta, FinishReason, Generation
from privmix.coordinator.text import Detokenizer, TextStream
from privmix.privacy.mollifiers.shaping import SamplingOptions
from privmix.structure.errors import StructureError
from privmix.structure.matcher import Matcher, Position


class LiveSequence:
    """Holds the context, the text and the finish reason of one generation.

    Attributes:
        channel: the channel of the gateway that submitted it.
        tokens: the whole context, prompt and output. It grows at its end.
        public: whether the public model alone answers from now on, at no charge.
        options: the sampling options of the next token.
        started: whether a token was released.
        sampled: whether its next token is sampled, and not known here yet. The shards know it.
        uncached: the number of the latest tokens of the context that the shards have not read.
        unreported: the number of charged tokens that no delta has reported yet.

    Args:
        matcher: follows the completion through `generation.grammar`; None without a grammar. `begin` comes first.
    """

    def __init__(
        self, channel: str, generation: Generation, detokenizer: Detokenizer, matcher: Matcher | None = None
    ) -> None:
        self.channel = channel
        self.generation = generation
        self.tokens = [*generation.prompt, *generation.released]
        self.public = False
        self.sampled = False
        self.finish_reason: FinishReason | None = None
        self.waiting_since = time.monotonic()
        self.options: SamplingOptions = generation.options
        self.started = bool(generation.released)
        self.uncached = len(self.tokens)
        self._matcher = matcher
        self.unreported = 0
        self._payable = generation.max_tokens if generation.max_charged is None else generation.max_charged
        self._end: tuple[int, ...] | None = None  # completes the structure, and fits into `remaining`
        self._held = Delta(generation.id, "")
        self._text = TextStream(detokenizer, generation.prompt, generation.stop, ignore_eos=generation.ignore_eos)
        for token in generation.released:
            self._text.push(token)  # the client has this text; only an unfinished character or stop string is held back

    def waited(self) -> float:
        """Returns the seconds since the previous call, or since the submission, and restarts the clock."""
        previous, self.waiting_since = self.waiting_since, time.monotonic()
        return self.waiting_since - previous

    @property
    def remaining(self) -> int:
        """The number of tokens that it may still release."""
        return self.generation.max_tokens - (len(self.tokens) - len(self.generation.prompt))

    @property
    def payable(self) -> int:
        """The number of tokens that it may still charge."""
        return min(self._payable, self.remaining) - self.sampled

    @property
    def length(self) -> int:
        """The number of tokens in its context, with the one that is not known here yet."""
        return len(self.tokens) + self.sampled

    @property
    def advances(self) -> bool:
        """Whether the next step may advance it: a token that is not known yet may be its last or move its grammar."""
        return not self.sampled or (not self.structured and (self.public or self.payable > 0) and self.remaining > 1)

    @property
    def id(self) -> str:
        return self.generation.id

    @property
    def structured(self) -> bool:
        """Whether a grammar restricts the completion."""
        return self._matcher is not None

    def position(self, *token: int) -> Position | None:
        """Returns what follows the completion and then `token`; None without a grammar, or if the engine gives up.

        It may take milliseconds, and changes nothing.
        """
        if self._matcher is None:
            return None
        completion = self.tokens[len(self.generation.prompt) :]
        try:
            return self._matcher.after((*completion, *token), self.remaining - len(token))
        except StructureError:
            return None

    def begin(self, position: Position | None) -> Delta | None:
        """Takes the tokens that are forced before any model is asked. Returns a delta if they can be released now.

        Otherwise they wait for the first sampled token, so that a request that is refused for lack of budget has
        released nothing.
        """
        self._held = self._take((), position)
        ready = self.finish_reason is not None or (self.started and self._held.tokens)
        return self._with_held() if ready else None

    def charge(self, tokens: int = 1) -> None:
        """Counts tokens that are charged now, so that a delta reports them, also if they are never released."""
        self.unreported += tokens

    def expect(self) -> None:
        """Notes that its next token is sampled. The shards have read its context, and continue it by the token."""
        self.sampled, self.uncached = True, 0

    def accept(self, token: int, position: Position | None = None) -> Delta:
        """Appends a sampled token, which must be paid for, and those forced after it, and returns the new text.

        Once an end of a structured completion is known that fits, one is known until it ends: if none fits after the
        sampled token, the known end is released instead of the token. So what is released depends on the grammar and on
        tokens that were paid for, and on nothing else.

        Args:
            position: what follows the token (`position`).
        """
        self.started, self.sampled = True, False
        self.uncached = 0
        self._payable -= not self.public
        if self._end is not None and not self._fits((token,), position):
            return self._with_held(self._completed("length"))
        if not self.public:
            self.unreported = max(0, self.unreported - 1)  # the delta carries this token
        return self._with_held(self._take((token,), position))

    def forget_cache(self) -> None:
        """Assumes that the shards have lost the whole context, and a token that was sampled."""
        self.sampled, self.uncached = False, len(self.tokens)

    def end(self, reason: FinishReason, retry_after: float | None = None) -> Delta:
        """Ends the generation and returns its last delta. See `Delta.retry_after`. Drops forced tokens that wait.

        Completes the structure of a completion that has begun and for which no budget is left, because that is free.
        """
        if reason == "privacy_budget" and self.started and self._end is not None:
            return self._with_held(self._completed(reason))
        self.finish_reason = reason
        text = "" if self._held.tokens else self._text.finish()
        return Delta(self.id, text, (), reason, self.public, retry_after, lost=self._report_lost())

    def _take(self, sampled: tuple[int, ...], position: Position | None) -> Delta:
        """Appends a sampled token and those forced after it, until one of them ends the generation.

        If there is room for the known end only, that is forced, too.
        """
        fits = self._fits(sampled, position)
        text, begun = "", len(self.tokens)
        for token in (*sampled, *(position.forced if position else ())):
            self.tokens.append(token)
            text += self._text.push(token)
            if self._text.stopped:
                break
        self._end = position.end if position and fits else None
        self.finish_reason = self._reason(position)
        if self.finish_reason is not None:
            text += self._text.finish()
        elif position is not None:
            self.options = replace(self.generation.options, legal=position.legal)
        taken = tuple(self.tokens[begun:])
        self.uncached += len(taken)
        delta = Delta(self.id, text, taken, self.finish_reason, self.public, free=len(taken) - len(sampled))
        return delta if self.finish_reason or self._room else _joined(delta, self._completed("length"))

    def _completed(self, reason: FinishReason) -> Delta:
        """Appends the known end. The generation ends for `reason`, unless its text has a stop string."""
        delta = self._take((), Position(self._end or (), b"", ()))
        if self._text.stopped:
            return delta
        self.finish_reason = reason
        return replace(delta, finish_reason=reason, complete=True)

    def _fits(self, sampled: tuple[int, ...], position: Position | None) -> bool:
        """Tells whether an end is known at the position, which follows a sampled token, and `remaining` admits it."""
        if position is None or position.end is None:
            return False
        return len(sampled) + len(position.forced) + len(position.end) <= self.remaining

    @property
    def _room(self) -> bool:
        """Whether another token may be sampled."""
        paid = self.public or self._payable > 0
        return paid and self.remaining > len(self._end or ())

    def _reason(self, position: Position | None) -> FinishReason | None:
        if self._text.stopped or (position is not None and position.complete):
            return "stop"
        if self.structured and position is None:
            return "error"
        return None if self._room or self._end is not None else "length"

    def _with_held(self, delta: Delta | None = None) -> Delta:
        """Returns the tokens that wait and those of a delta as one delta."""
        held, self._held = self._held, Delta(self.id, "")
        if delta is None:
            return held
        lost, whole = self._report_lost(), _joined(held, delta) if held.tokens else delta
        return replace(whole, lost=lost) if lost else whole

    def _report_lost(self) -> int:
        """Returns `unreported`, and forgets it."""
        lost, self.unreported = self.unreported, 0
        return lost


def _joined(one: Delta, other: Delta) -> Delta:
    """Returns a delta and the one after it as one delta."""
    return replace(
        other, text=one.text + other.text, token_ids=one.token_ids + other.token_ids, free=one.free + other.free
    )
