"""Tokenises prompts with the tokenizer of the served model. Does not store or log them."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateError
from transformers import AutoTokenizer

from services.gateway.errors import invalid
from services.gateway.fields import PromptText
from services.gateway.schema import Message

# Longer text is tokenised in a thread. A thousand characters take about half a millisecond.
INLINE_CHARACTERS = 2048


class Prompts:
    """Tokenises prompts and chats. Thread-safe, because the Rust tokenizer has no mutable state."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._rust = tokenizer.backend_tokenizer
        self._vocabulary = len(tokenizer)

    @classmethod
    def load(cls, model: Path) -> Self:
        """Loads the tokenizer of a Hugging Face model directory.

        Raises:
            ValueError: the `tokenizers` library cannot run the tokenizer.
        """
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        if not tokenizer.is_fast:
            raise ValueError(f"{model}: the gateway needs a tokenizer with a tokenizer.json")
        return cls(tokenizer)

    async def tokens(self, prompts: Sequence[PromptText]) -> list[tuple[int, ...]]:
        """Returns the token ids of each prompt of a completion request.

        Raises:
            ApiError: a prompt has no token or an unknown token id.
        """
        tokenised = [await self._prompt_tokens(prompt) for prompt in prompts]
        if not all(tokenised):
            raise invalid("prompt", "a prompt has no tokens; give some text to continue")
        return tokenised

    async def chat_tokens(self, messages: Sequence[Message]) -> list[tuple[int, ...]]:
        """Returns the token ids of the prompt that the model's chat template generates from a chat, as a list of one.

        Raises:
            ApiError: the model has no chat template, or the template refuses these messages.
        """
        if not self._tokenizer.chat_template:
            raise invalid("messages", "this model has no chat template; use /v1/completions", "chat_not_supported")
        try:
            text = self._tokenizer.apply_chat_template(
                [message.for_template() for message in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError:
            # The template's error message is not shown, because it could quote a message of the chat.
            raise invalid("messages", "the model's chat template does not allow this sequence of roles") from None
        return [await self.encode(text, add_special_tokens=False)]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """Returns the vocabulary entry of each token id."""
        return [str(self._rust.id_to_token(token)) for token in tokens]

    def check(self, tokens: Sequence[int], field: str) -> None:
        """Checks token ids.

        Raises:
            ApiError: the model does not have one of the tokens.
        """
        if tokens and (min(tokens) < 0 or max(tokens) >= self._vocabulary):
            raise invalid(field, f"token ids of this model are 0 to {self._vocabulary - 1}")

    def text(self, prompt: PromptText) -> str:
        """Returns the text of a prompt, for `echo`."""
        return prompt if isinstance(prompt, str) else str(self._rust.decode(prompt, skip_special_tokens=False))

    async def _prompt_tokens(self, prompt: PromptText) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return await self.encode(prompt, add_special_tokens=True)
        self.check(prompt, "prompt")
        return tuple(prompt)

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """Returns the token ids of a text, which may be empty."""

        def encode() -> tuple[int, ...]:
            return tuple(self._rust.encode(text, add_special_tokens=add_special_tokens).ids)

        return encode() if len(text) <= INLINE_CHARACTERS else await asyncio.to_thread(encode)
