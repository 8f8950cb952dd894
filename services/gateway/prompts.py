"""From text to token ids, with the tokenizer of the served model. No prompt is kept or logged."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from jinja2 import TemplateError
from transformers import AutoTokenizer

from services.gateway.errors import invalid
from services.gateway.fields import PromptText
from services.gateway.schema import Message

# Longer text leaves the event loop: a thousand characters take about half a millisecond.
INLINE_CHARACTERS = 2048


class Prompts:
    """Tokenises prompts and chats. Thread-safe: the Rust tokenizer it calls keeps no state."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._rust = tokenizer.backend_tokenizer
        self._vocabulary = len(tokenizer)

    @classmethod
    def load(cls, model: Path) -> Self:
        """Read the tokenizer of a Hugging Face model directory.

        Raises:
            ValueError: the directory has no tokenizer that the `tokenizers` library can run.
        """
        tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)
        if not tokenizer.is_fast:
            raise ValueError(f"{model}: the tokenizer has no tokenizer.json form, which the gateway needs")
        return cls(tokenizer)

    async def tokens(self, prompts: Sequence[PromptText]) -> list[tuple[int, ...]]:
        """The token ids of each prompt of a completion request.

        Raises:
            ApiError: a prompt without a token, or with a token that the model does not know.
        """
        tokenised = [await self._prompt_tokens(prompt) for prompt in prompts]
        if not all(tokenised):
            raise invalid("prompt", "a prompt has no token; give some text to continue")
        return tokenised

    async def chat_tokens(self, messages: Sequence[Message]) -> list[tuple[int, ...]]:
        """The token ids of the one prompt that the model's chat template makes of a chat.

        Raises:
            ApiError: the model has no chat template, or its template refuses these messages.
        """
        if not self._tokenizer.chat_template:
            raise invalid("messages", "this model has no chat template; use /v1/completions", "chat_not_supported")
        try:
            text = self._tokenizer.apply_chat_template(
                [message.for_template() for message in messages], tokenize=False, add_generation_prompt=True
            )
        except TemplateError:
            # The template's own reason could quote a message.
            raise invalid("messages", "the model's chat template does not allow this sequence of roles") from None
        return [await self.encode(text, add_special_tokens=False)]

    def pieces(self, tokens: Sequence[int]) -> list[str]:
        """The vocabulary's entry for each token id."""
        return [str(self._rust.id_to_token(token)) for token in tokens]

    def check(self, tokens: Sequence[int], field: str) -> None:
        """
        Raises:
            ApiError: one of these is no token of the model.
        """
        if tokens and (min(tokens) < 0 or max(tokens) >= self._vocabulary):
            raise invalid(field, f"token ids of this model are 0 to {self._vocabulary - 1}")

    def text(self, prompt: PromptText) -> str:
        """What `echo` repeats."""
        return prompt if isinstance(prompt, str) else str(self._rust.decode(prompt, skip_special_tokens=False))

    async def _prompt_tokens(self, prompt: PromptText) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return await self.encode(prompt, add_special_tokens=True)
        self.check(prompt, "prompt")
        return tuple(prompt)

    async def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        """The token ids of any text, even none."""

        def encode() -> tuple[int, ...]:
            return tuple(self._rust.encode(text, add_special_tokens=add_special_tokens).ids)

        return encode() if len(text) <= INLINE_CHARACTERS else await asyncio.to_thread(encode)
