"""Decodes released tokens incrementally: emits whole characters only, and no part of a stop string."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer

from privmix.structure.vocabulary import Vocabulary
from privmix.tokenization.tokenizer import load_tokenizer

REPLACEMENT = "\ufffd"
# A UTF-8 character has at most four bytes, so an incomplete one has at most three.
LONGEST_PARTIAL = 3
# Tokenizers with a word-start marker drop the leading space of the text; a few tokens of context preserve it.
CONTEXT_TOKENS = 6
_CONTINUES = (0x80, 0x90, 0xA0)
"""Bytes that continue a character. The first bytes of each character admit one of them."""


def partial_length(tokenizer: Tokenizer, tokens: Sequence[int]) -> int:
    """Returns how many U+FFFD at the end of the text of these tokens stand for a part of a character.

    A U+FFFD that a model has written, and bytes that no others can make a character, are not counted.
    """
    text = str(tokenizer.decode(tokens, skip_special_tokens=False))
    if not text.endswith(REPLACEMENT):
        return 0
    bytes_ = {byte: token for byte in _CONTINUES if (token := _byte_token(tokenizer, byte)) is not None}
    for second in bytes_:
        for more in range(LONGEST_PARTIAL):
            whole = tokenizer.decode([*tokens, bytes_[second], *[bytes_[0x80]] * more], skip_special_tokens=False)
            if not whole.endswith(REPLACEMENT):
                return len(text) - len(whole) + 1
    return 0


def _byte_token(tokenizer: Tokenizer, byte: int) -> int | None:
    """Returns the token of a byte above 0x7F, as byte-level BPE or byte fallback names it."""
    # GPT-2 names the bytes that Latin-1 does not print by the characters from 256 on: 0 to 32, and then 127 to 160.
    for name in (chr(0x100 + 33 + byte - 127), f"<0x{byte:02X}>"):
        token: int | None = tokenizer.token_to_id(name)
        if token is not None:
            return token
    return None


class Detokenizer:
    """Decodes tokens of one model. It is read-only, and all streams share it.

    `ends` holds the token ids that end a completion. Special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        self.ends = ends
        self._tokenizer = tokenizer
        self._special = frozenset(
            token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
        )

    @classmethod
    def load(cls, model: Path) -> Self:
        """Reads the tokenizer and the end tokens from a Hugging Face model directory.

        Raises:
            ValueError: the directory has no tokenizer that the `tokenizers` library can run.
        """
        tokenizer = load_tokenizer(model)
        if not tokenizer.is_fast:
            raise ValueError(f"{model}: the tokenizer has no tokenizer.json form, which detokenisation needs")
        ends = {tokenizer.eos_token_id, *_ids(_generation_ends(model))} - {None}
        return cls(tokenizer.backend_tokenizer, frozenset(ends))

    def vocabulary(self) -> Vocabulary:
        """Returns the vocabulary for grammars (see `Vocabulary.of`)."""
        return Vocabulary.of(self._tokenizer, self.ends)

    def textual(self, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens that are not special."""
        return [token for token in tokens if token not in self._special]

    def decode(self, tokens: Sequence[int]) -> str:
        """Decodes the tokens together."""
        return str(self._tokenizer.decode(self.textual(tokens), skip_special_tokens=False))

    def partial_length(self, tokens: Sequence[int]) -> int:
        """See `partial_length`."""
        return partial_length(self._tokenizer, self.textual(tokens))


class TextStream:
    """Decodes the text of one generation after `prompt` and cuts it before the first stop string.

    If several stop strings match, the one that ends first counts; among those that end at the same character, the
    longest. So the text does not depend on token boundaries.
    """

    def __init__(
        self, detokenizer: Detokenizer, prompt: Sequence[int], stop: Sequence[str] = (), *, ignore_eos: bool = False
    ) -> None:
        self.stopped = False
        self._ends = frozenset[int]() if ignore_eos else detokenizer.ends
        self._characters = _Characters(detokenizer, prompt)
        self._stops = _Stops(stop)

    def push(self, token: int) -> str:
        """Takes the next token and returns the text that is now final.

        Sets `stopped` at an end token or a stop string.
        """
        if token in self._ends:
            text = self.finish()
            self.stopped = True
            return text
        return self._pass(self._characters.push(token))

    def finish(self) -> str:
        """Ends the stream and returns the text that was held back."""
        if self.stopped:
            return ""
        text = self._pass(self._characters.flush())
        return text if self.stopped else text + self._stops.flush()

    def _pass(self, text: str) -> str:
        text, self.stopped = self._stops.push(text)
        return text


class _Characters:
    """Decodes a short window of the latest tokens and returns the text that is new in it.

    The window starts at a character boundary. Its last group of tokens stays in the window as context for the next
    group, like the prefix and read offsets of text-generation-inference and vLLM.
    """

    def __init__(self, detokenizer: Detokenizer, prompt: Sequence[int]) -> None:
        self._detokenizer = detokenizer
        self._window = detokenizer.textual(prompt[-CONTEXT_TOKENS:])
        self._context = len(self._window)
        self._emitted = detokenizer.decode(self._window)

    def push(self, token: int) -> str:
        textual = self._detokenizer.textual((token,))
        if not textual:
            return ""
        self._window += textual
        new = self._new_text()
        if not new.endswith(REPLACEMENT):
            if new:
                self._slide()
            return new
        if len(self._window) - self._context <= LONGEST_PARTIAL:
            return ""
        # No character has this many bytes: the earlier bytes are invalid, and only the latest can still become one.
        final = new[: len(new) - _trailing_replacements(new)]
        self._emitted += final
        return final

    def flush(self) -> str:
        """Returns the text that was held back, without a part of a character."""
        new = self._new_text()
        partial = self._detokenizer.partial_length(self._window) if new.endswith(REPLACEMENT) else 0
        return new[: max(0, len(new) - partial)]

    def _new_text(self) -> str:
        text = self._detokenizer.decode(self._window)
        # A prompt of token ids may end inside a character, which this token completes.
        emitted = self._emitted if text.startswith(self._emitted) else self._emitted.rstrip(REPLACEMENT)
        return text[len(emitted) :]

    def _slide(self) -> None:
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._emitted = self._detokenizer.decode(self._window)


class _Stops:
    """Holds back text that may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text that is now final, and whether a stop string ends it."""
        text = self._held + text
        matches = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            return text[: min(matches)[1]], True
        final = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[final:]
        return text[:final], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Returns the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


def _trailing_replacements(text: str) -> int:
    return min(len(text) - len(text.rstrip(REPLACEMENT)), LONGEST_PARTIAL)


def _generation_ends(model: Path) -> int | list[int] | None:
    file = model / "generation_config.json"
    ends: int | list[int] | None = json.loads(file.read_bytes()).get("eos_token_id") if file.is_file() else None
    return ends


def _ids(ends: int | list[int] | None) -> list[int]:
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else ends
