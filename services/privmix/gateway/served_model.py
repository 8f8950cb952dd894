"""Holds the model that a gateway serves, and tokenises prompts with its tokenizer."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeVar

from jinja2 import TemplateError

from privmix.coordinator.text import Detokenizer, partial_length
from privmix.foundation.turns import Turns
from privmix.gateway.coordinator_client import CoordinatorClient
from privmix.gateway.errors import ApiError, invalid
from privmix.gateway.schema import Message, PromptText
from privmix.gateway.settings import ServedEnsemble
from privmix.gateway.status import Status
from privmix.keys.messages import TrafficUpdate
from privmix.structure.compiler import Compiler
from privmix.tokenization.people_text import PeopleText
from privmix.tokenization.tokenizer import load_tokenizer

T = TypeVar("T")


INLINE_CHARACTERS = 2048
"""Longer text is tokenised in a thread. A thousand characters take about half a millisecond."""
LIKELY_CHARACTERS = 8
"""The characters for each token that a prompt has at most. Of a longer one, the beginning is tokenised first."""
SLACK_TOKENS = 64
"""How many more tokens the beginning of a text may have than the whole text has there."""
THREADS = 2
"""The number of texts that are tokenised at once."""

# A template's expressions can fail on a message that is valid, such as one without content.
TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, RecursionError)


class PromptTokenizer:
    """Tokenises prompts and chats. Long ones in threads of its own, in which the Rust tokenizer blocks nobody.

    A client waits for its own long texts. `limit` is the maximum number of tokens of each prompt: much longer texts
    are refused by their size or by their beginning.

    Attributes:
        compiler: compiles the grammars of answers.
    """

    def __init__(self, tokenizer: Any, compiler: Compiler) -> None:
        self.compiler = compiler
        self._tokenizer = tokenizer
        self._rust = tokenizer.backend_tokenizer
        self._people = PeopleText(tokenizer).prepare()
        self._vocabulary = len(tokenizer)
        self._longest = max(len(piece.encode()) for piece in self._rust.get_vocab())
        self._turns = Turns(THREADS)
        self._threads = ThreadPoolExecutor(THREADS, "tokenise")

    @classmethod
    def load(cls, model: Path) -> Self:
        """Loads the tokenizer of a Hugging Face model directory.

        Raises:
            ValueError: the `tokenizers` library cannot run the tokenizer.
        """
        tokenizer = load_tokenizer(model)
        if not tokenizer.is_fast:
            raise ValueError(f"{model}: the gateway needs a tokenizer with a tokenizer.json")
        return cls(tokenizer, Compiler(lambda: Detokenizer.load(model).vocabulary()))

    async def tokens(self, prompts: Sequence[PromptText], limit: int, client: str = "") -> list[tuple[int, ...]]:
        """Returns the token ids of each prompt of a completion request.

        Raises:
            ApiError: a prompt has no token, an unknown token id, or more than `limit` tokens.
        """
        tokenised = [await self._prompt_tokens(prompt, limit, client) for prompt in prompts]
        if not all(tokenised):
            raise invalid("prompt", "a prompt has no tokens; give some text to continue")
        return tokenised

    async def chat_tokens(self, messages: Sequence[Message], limit: int, client: str = "") -> list[tuple[int, ...]]:
        """Returns the token ids of the prompt that the model's chat template generates from a chat, as a list of one.

        A special token in a message is text: nobody but the template ends a turn or begins one.

        Raises:
            ApiError: the model has no chat template, or the template refuses these messages, or there are more than
                `limit` tokens.
        """
        if not self._tokenizer.chat_template:
            raise invalid("messages", "this model has no chat template; use /v1/completions", "chat_not_supported")
        written = [_for_template(message) for message in messages]
        size = sum(len(message.content) for message in messages)
        self._check_size(size, limit, "messages")
        size += INLINE_CHARACTERS // 32 * len(written)  # the template writes text around each message
        try:
            text, marks = await self._run(
                size, client, lambda: self._people.render(written, add_generation_prompt=True)
            )
        except TEMPLATE_ERRORS:
            # The template's error message is not shown, because it could quote a message of the chat.
            raise invalid("messages", "the model's chat template does not allow this sequence of roles") from None
        shown = marks.show(text)
        return [await self._limited(shown, limit, "messages", client, lambda: self._people.rendered(text, marks))]

    async def text(self, prompt: PromptText, client: str = "") -> str:
        """Returns the text of a prompt, for `echo`. A character that it begins only belongs to the answer."""
        if isinstance(prompt, str):
            return prompt

        def decode() -> str:
            (text,) = self._rust.decode_batch([prompt], skip_special_tokens=False)
            return str(text[: len(text) - partial_length(self._rust, prompt)])

        return await self._run(len(prompt), client, decode)

    async def _prompt_tokens(self, prompt: PromptText, limit: int, client: str) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return await self.encode(prompt, limit, "prompt", client, add_special_tokens=True)
        if len(prompt) > limit:
            raise _too_long("prompt", limit)
        if prompt and (min(prompt) < 0 or max(prompt) >= self._vocabulary):
            raise invalid("prompt", f"token ids of this model are 0 to {self._vocabulary - 1}")
        return tuple(prompt)

    async def encode(
        self, text: str, limit: int, field: str, client: str = "", *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        """Returns the token ids of a text, which may be empty. A special token that a client types is text.

        Raises:
            ApiError: there are more than `limit`.
        """
        return await self._limited(
            text, limit, field, client, lambda: self._people.tokens(text, add_special_tokens=add_special_tokens)
        )

    async def _limited(
        self, text: str, limit: int, field: str, client: str, encode: Callable[[], list[int]]
    ) -> tuple[int, ...]:
        """Returns the tokens that `encode` makes of a text. Of a long text, the beginning is tokenised first."""
        self._check_size(len(text), limit, field)

        def encoded() -> list[int] | None:
            likely = LIKELY_CHARACTERS * limit
            return None if len(text) > likely and self._least(text[:likely]) > limit + SLACK_TOKENS else encode()

        tokens = await self._run(len(text), client, encoded)
        if tokens is None or len(tokens) > limit:
            raise _too_long(field, limit)
        return tuple(tokens)

    def _least(self, text: str) -> int:
        """Returns the number of tokens if each special token in the text were one."""
        (encoding,) = self._rust.encode_batch_fast([text], add_special_tokens=False)
        return len(encoding.ids)

    def _check_size(self, characters: int, limit: int, field: str) -> None:
        if characters > self._longest * limit:  # a character has at least one byte
            raise _too_long(field, limit)

    async def _run(self, size: int, client: str, work: Callable[[], T]) -> T:
        """Calls a function, in a thread if it takes long."""
        if size <= INLINE_CHARACTERS:
            return work()
        async with self._turns.turn(client):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _for_template(message: Message) -> dict[str, str]:
    # Templates use the role `system` for OpenAI's `developer`.
    return {"role": "system" if message.role == "developer" else message.role, "content": message.content}


def _too_long(field: str, limit: int) -> ApiError:
    return invalid(field, f"it has more than {limit} tokens; make it shorter", "context_length_exceeded")


class ServedModel:
    """Holds what a gateway needs to serve its ensemble: the tokenizer, the coordinators and the status."""

    def __init__(
        self, ensemble: ServedEnsemble, prompts: PromptTokenizer, client: CoordinatorClient, status: Status
    ) -> None:
        self.ensemble = ensemble
        self.prompts = prompts
        self.client = client
        self.status = status

    @classmethod
    def of(cls, ensemble: ServedEnsemble) -> Self:
        """Loads an ensemble. This takes seconds, because it reads the tokenizer.

        Raises:
            OSError, ValueError: the model directory has no usable tokenizer.
        """
        client = CoordinatorClient(
            ensemble.namespace, ensemble.coordinators, ensemble.stall_timeout_s, ensemble.recovery_s
        )
        status = Status(ensemble.namespace, ensemble.coordinators)
        return cls(ensemble, prompts_of(ensemble.model), client, status)

    def check_name(self, name: str | None) -> None:
        """Checks the model name of a request, which may have none.

        Raises:
            ApiError: 404, the model has another name.
        """
        if name is not None and name not in self.ensemble.names:
            names = ", ".join(self.ensemble.names)
            raise invalid("model", f"no such model; this service has: {names}", "model_not_found", 404)

    def take_update(self) -> TrafficUpdate:
        """Returns the counts of traffic since the last call."""
        return self.client.counters.take(self.client.live)


@cache
def prompts_of(model: Path) -> PromptTokenizer:
    """Returns the tokenizer of a model directory."""
    return PromptTokenizer.load(model)
