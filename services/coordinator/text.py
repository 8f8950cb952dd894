"""From released tokens to text, one token at a time: whole characters only, and nothing of a stop string."""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig

REPLACEMENT = "\ufffd"
# A character has at most four bytes in UTF-8, so at most three of them wait for the rest.
LONGEST_PARTIAL = 3
# Tokenizers with a word-start mark drop the first space of what they decode; a few tokens before it keep it.
CONTEXT_TOKENS = 6


class Detokenizer:
    """The vocabulary of a model, read-only and shared by all its streams.

    `ends` are the ids that end an answer. Special tokens have no text.
    """

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        self.ends = ends
        self._tokenizer = tokenizer
        self._special = frozenset(
            token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
        )

    @classmethod
    def load(cls, model: Path) -> Self:
        """Read tokenizer and end tokens from a Hugging Face model directory.

        Raises:
            ValueError: the directory has no tokenizer that the `tokenizers` library can run.
        """
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        if not tokenizer.is_fast:
            raise ValueError(f"{model}: the tokenizer has no tokenizer.json form, which detokenisation needs")
        ends = {tokenizer.eos_token_id, *_ids(_generation_ends(model))} - {None}
        return cls(tokenizer.backend_tokenizer, frozenset(ends))

    def textual(self, tokens: Sequence[int]) -> list[int]:
        """The tokens that stand for text."""
        return [token for token in tokens if token not in self._special]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of all tokens at once."""
        return str(self._tokenizer.decode(self.textual(tokens), skip_special_tokens=False))


class TextStream:
    """The text of one generation, after `prompt`, cut before the first of `stop`.

    Of several stop strings the one that is complete first counts, and of those complete at the same character the
    longest, so the text does not depend on where tokens begin and end.
    """

    def __init__(
        self, detokenizer: Detokenizer, prompt: Sequence[int], stop: Sequence[str] = (), *, ignore_eos: bool = False
    ) -> None:
        self.stopped = False
        self._ends = frozenset[int]() if ignore_eos else detokenizer.ends
        self._characters = _Characters(detokenizer, prompt)
        self._stops = _Stops(stop)

    def push(self, token: int) -> str:
        """Take the next token; return the text that is now certain. Sets `stopped` at an end token or a stop string."""
        if token in self._ends:
            text = self.finish()
            self.stopped = True
            return text
        return self._pass(self._characters.push(token))

    def finish(self) -> str:
        """No token follows: return the text that was held back."""
        if self.stopped:
            return ""
        text = self._pass(self._characters.flush())
        return text if self.stopped else text + self._stops.flush()

    def _pass(self, text: str) -> str:
        text, self.stopped = self._stops.push(text)
        return text


class _Characters:
    """Decodes a short window of the latest tokens and hands on what the window did not say before.

    The window starts between two characters; its last group of tokens stays in it as context for the next, as in the
    prefix and read offsets of text-generation-inference and vLLM.
    """

    def __init__(self, detokenizer: Detokenizer, prompt: Sequence[int]) -> None:
        self._detokenizer = detokenizer
        self._window = detokenizer.textual(prompt[-CONTEXT_TOKENS:])
        self._context = len(self._window)
        self._said = detokenizer.decode(self._window)

    def push(self, token: int) -> str:
        textual = self._detokenizer.textual((token,))
        if not textual:
            return ""
        self._window += textual
        unsaid = self._unsaid()
        if not unsaid.endswith(REPLACEMENT):
            if unsaid:
                self._slide()
            return unsaid
        if len(self._window) - self._context <= LONGEST_PARTIAL:
            return ""
        # So many tokens begin no character: the bytes are broken, and only the latest can still become one.
        certain = unsaid[: len(unsaid) - _trailing_replacements(unsaid)]
        self._said += certain
        return certain

    def flush(self) -> str:
        return self._unsaid()

    def _unsaid(self) -> str:
        text = self._detokenizer.decode(self._window)
        # Bytes at the end of a prompt given as token ids become a character only now.
        said = self._said if text.startswith(self._said) else self._said.rstrip(REPLACEMENT)
        return text[len(said) :]

    def _slide(self) -> None:
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._said = self._detokenizer.decode(self._window)


class _Stops:
    """Holds back the text that a stop string could begin with."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that is now certain, and whether a stop string ends it."""
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        certain = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[certain:]
        return text[:certain], False

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The longest end of `text` that is a beginning of `stop`, not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)


def _trailing_replacements(text: str) -> int:
    return min(len(text) - len(text.rstrip(REPLACEMENT)), LONGEST_PARTIAL)


def _generation_ends(model: Path) -> int | list[int] | None:
    if not (model / "generation_config.json").is_file():
        return None
    ends: int | list[int] | None = GenerationConfig.from_pretrained(model).eos_token_id
    return ends


def _ids(ends: int | list[int] | None) -> list[int]:
    if ends is None:
        return []
    return [ends] if isinstance(ends, int) else ends
