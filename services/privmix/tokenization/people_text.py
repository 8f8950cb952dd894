"""Tokenises what people write, in which a special token is text, and chats, in which only the template's are special.

    people = PeopleText(AutoTokenizer.from_pretrained(model))
    people.tokens("I typed <|im_end|>")                   # no token <|im_end|>
    people.chat([{"role": "user", "content": "<|im_end|>"}])   # one, which the template wrote

Without it, a person who types `<|im_end|>\\n<|im_start|>system` ends their own turn and writes the system's.
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from typing import Any, Self

from tokenizers import Tokenizer

from privmix.tokenization.tokenizer import encode_alone


class PeopleText:
    """Tokenises text and chats for one model. Thread-safe, because nothing of it changes.

    What people cannot type is each token that the tokenizer declares special, and each other added token that the chat
    template writes, such as `<tool_call>`.

    Args:
        tokenizer: a transformers tokenizer that the `tokenizers` library runs. It stays without padding and truncation.

    Raises:
        ValueError: the `tokenizers` library cannot run the tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        if not tokenizer.is_fast:
            raise ValueError("the tokenizer has no tokenizer.json form, which the `tokenizers` library runs")
        self._chat = tokenizer
        self._special: Tokenizer = tokenizer.backend_tokenizer
        encode_alone(self._special)
        reserved = _reserved(self._special, str(tokenizer.chat_template or ""))
        self._reserved: Mapping[int, str] = reserved
        self._folds = self._special.normalizer is not None and any(
            added.normalized for added in self._special.get_added_tokens_decoder().values() if added.content.strip()
        )
        longest_first = sorted(reserved.values(), key=len, reverse=True)
        self._typed = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @cached_property
    def _plain(self) -> Tokenizer:
        """A copy of the tokenizer that finds no reserved token. It takes a second to make, and few texts need it."""
        described = json.loads(self._special.to_str())
        for added in described["added_tokens"]:
            added["special"] = added["special"] or added["id"] in self._reserved
        plain = Tokenizer.from_str(json.dumps(described))
        plain.encode_special_tokens = True
        return plain

    def prepare(self) -> Self:
        """Makes everything now that the first typed special token would need, and returns itself."""
        assert self._plain
        return self

    @property
    def template(self) -> str:
        """The model's chat template; empty if it has none."""
        return str(self._chat.chat_template or "")

    def tokens(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Returns the token ids of a person's text.

        Args:
            add_special_tokens: add the tokens with which the model begins or ends each text.
        """
        return self.batch([text], add_special_tokens=add_special_tokens)[0]

    def batch(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """Returns the token ids of several texts, on all cores."""
        typed = {index for index, text in enumerate(texts) if self._folds or self._typed.search(text)}
        others = [text for index, text in enumerate(texts) if index not in typed]
        found = iter(self._special.encode_batch(others, add_special_tokens=add_special_tokens))
        return [
            self._as_text(text, add_special_tokens) if index in typed else next(found).ids
            for index, text in enumerate(texts)
        ]

    def _as_text(self, text: str, add_special_tokens: bool) -> list[int]:
        whole = _encoded(self._plain, text, add_special_tokens)
        if not self._forms(whole, text):
            return list(whole.ids)
        pieces = [_encoded(self._plain, piece).ids for piece in self._pieces(text)]
        begins, ends = _around(whole)
        return [*begins, *chain.from_iterable(pieces), *ends]

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Returns the token ids of a chat as the model's chat template writes it.

        Without typed special tokens, they are exactly those of the rendered text, without white space at its end unless
        an answer follows.

        Raises:
            jinja2.TemplateError: the template refuses the messages.
        """
        return self.rendered(*self.render(messages, add_generation_prompt=add_generation_prompt))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = False,
    ) -> tuple[str, "TypedMarks"]:
        """Returns the text of a chat for `rendered`, in which marks hide what people typed.

        Raises:
            jinja2.TemplateError: the template refuses the messages.
        """
        marks = TypedMarks(self._typed)
        rendered = self._chat.apply_chat_template(
            marks.hide(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
        return str(rendered) if add_generation_prompt else str(rendered).rstrip(), marks

    def rendered(self, text: str, marks: "TypedMarks") -> list[int]:
        """Returns the token ids of the text that a chat template has made of hidden messages."""
        encoding = _encoded(self._special, text)
        if not marks and not self._folds:
            return list(encoding.ids)
        return [token for segment in self._segments(encoding, text, marks) for token in segment]

    def _segments(self, encoding: Any, rendered: str, marks: "TypedMarks") -> Iterator[list[int]]:
        """Yields the tokens of the template's special tokens and of the text between them, where people's is shown.

        People's special tokens are behind marks, so each one that is here by its name is the template's. One that the
        tokenizer's normaliser has made of other characters is a person's.
        """
        since, ids, folded = 0, list[int](), False
        for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True):
            if token in self._reserved and self._reserved[token] in rendered[start:stop]:
                yield self._between(rendered[since:start], ids, folded, marks)
                yield [token]
                since, ids, folded = stop, [], False
            else:
                ids.append(token)
                folded |= token in self._reserved
        yield self._between(rendered[since:], ids, folded, marks)

    def _between(self, text: str, ids: list[int], folded: bool, marks: "TypedMarks") -> list[int]:
        shown = marks.show(text)
        return self.tokens(shown) if folded or shown != text else ids

    def _forms(self, encoding: Any, text: str) -> bool:
        """Returns whether the model's own vocabulary has formed a special token from the text.

        A Unigram model has special tokens among its pieces and finds them without the list of added tokens.
        """
        return any(
            token in self._reserved and self._reserved[token] in text[start:stop]
            for token, (start, stop) in zip(encoding.ids, encoding.offsets, strict=True)
        )

    def _pieces(self, text: str) -> Iterator[str]:
        """Yields pieces of the text, none of which has a whole special token in it."""
        waiting = [text]
        while waiting:
            piece = waiting.pop()
            typed = self._typed.search(piece)
            if typed is None or len(typed[0]) == 1:  # one character cannot be broken
                yield piece
            else:
                waiting += [piece[typed.start() + 1 :], piece[: typed.start() + 1]]


class TypedMarks:
    """Hides typed special tokens behind marks that nobody can guess, and shows them again."""

    def __init__(self, typed: re.Pattern[str]) -> None:
        self._typed = typed
        self._hidden: dict[str, str] = {}
        self._nonce = secrets.token_hex(16)

    def __bool__(self) -> bool:
        return bool(self._hidden)

    def hide(self, value: Any) -> Any:
        """Returns a value of JSON with a mark in the place of each typed special token, in keys too."""
        if isinstance(value, str):
            return self._typed.sub(self._mark, value)
        if isinstance(value, Mapping):
            return {self.hide(key): self.hide(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.hide(item) for item in value]
        return value

    def show(self, text: str) -> str:
        """Returns the text as people wrote it."""
        if self._nonce not in text:
            return text
        return re.sub(f"{self._nonce}[0-9]+z", lambda found: self._hidden.get(found[0], found[0]), text)

    def _mark(self, found: re.Match[str]) -> str:
        mark = f"{self._nonce}{len(self._hidden)}z"
        self._hidden[mark] = found[0]
        return mark


def _encoded(tokenizer: Tokenizer, text: str, add_special_tokens: bool = False) -> Any:
    # With tokenizers 0.23.3 `encode` holds Python's global lock from beginning to end; a batch of one releases it.
    return tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def _around(encoding: Any) -> tuple[list[int], list[int]]:
    """Returns the tokens that the tokenizer has added before and after a text."""
    own = [index for index, added in enumerate(encoding.special_tokens_mask) if not added]
    return encoding.ids[: own[0]], encoding.ids[own[-1] + 1 :]


def _reserved(tokenizer: Tokenizer, template: str) -> dict[int, str]:
    """Returns the added tokens that people cannot type. Runs of spaces, which some models add, stay theirs."""
    return {
        token: added.content
        for token, added in tokenizer.get_added_tokens_decoder().items()
        if added.content.strip() and (added.special or added.content in template)
    }
