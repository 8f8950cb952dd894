"""Defines the messages between gateway and coordinator."""

from dataclasses import dataclass
from typing import Literal

from privmix.privacy.mollifiers.shaping import SamplingOptions

FinishReason = Literal["stop", "length", "privacy_budget", "share", "error", "cancelled"]
"""Why a generation ended. The gateway alone sets `share`: the API key has used up its share of the budget."""


@dataclass(frozen=True)
class Generation:
    """Describes one completion to generate. A request with several prompts or choices becomes several generations.

    Attributes:
        prompt: token ids.
        max_tokens: the maximum number of released tokens. Each released token is charged.
        max_charged: the maximum number of charged tokens; None for no other limit than `max_tokens`.
        stop: strings that end the completion. They are not part of its text.
        ignore_eos: continue after the model's end token.
        released: the tokens that a lost coordinator released for this completion. They follow the prompt and count
            towards `max_tokens`; their text is not sent again.
        cache_salt: see `privmix.engine.engine.Request`.
        grammar: the grammar of the completion (`privmix.structure.grammar`); None allows every text. A token
            without an alternative is released without a question to any model, and is not charged. So are the tokens
            that complete the text before it reaches a limit.
    """

    id: str
    prompt: tuple[int, ...]
    options: SamplingOptions
    max_tokens: int
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    released: tuple[int, ...] = ()
    cache_salt: str | None = None
    grammar: str | None = None
    max_charged: int | None = None


@dataclass(frozen=True)
class Delta:
    """Carries the new tokens and text of one generation.

    Attributes:
        text: the text that has become final. It is empty while it may still become a stop string or a whole character.
        token_ids: the tokens released since the previous delta.
        finish_reason: set in the last delta only.
        complete: whether a text that a limit ended is complete under its grammar.
        public: the base model alone answered, public or private, at no charge.
        free: the number of these tokens that had no alternative under the grammar, or complete it before a limit, and
            were not charged.
        retry_after: after "error", the number of seconds after which the request may succeed; None if a retry does not
            help.
        lost: the number of further tokens that were charged and that no delta carries: the generation ended, or its
            step failed, after they were charged, or no end of the structure fits after them.
    """

    id: str
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    public: bool = False
    retry_after: float | None = None
    free: int = 0
    lost: int = 0
    complete: bool = False

    @property
    def tokens(self) -> int:
        """The number of tokens released."""
        return len(self.token_ids)

    @property
    def charged(self) -> int:
        """The number of tokens charged to the budget."""
        return self.lost + (0 if self.public else self.tokens - self.free)
