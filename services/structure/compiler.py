"""Compiles grammars against a model's vocabulary, within limits of time and memory."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from hashlib import sha256

from llguidance import LLMatcher, LLParserLimits

from services.structure.errors import StructureError
from services.structure.grammar import is_choice
from services.structure.limits import MAX_BYTES
from services.structure.matcher import Matcher
from services.structure.vocabulary import Vocabulary

COMPILE_S = 10.0
"""The limit of a compilation. The limits below end almost every one in less than 0.3 s."""
CHECKED_TOKENS = 4096
"""The length up to which the forced beginning of a grammar is computed, to see whether it leads to a text."""
MAX_CHECKED = 4096
"""The number of grammars that are known to compile."""


def _limits(step_lexer_fuel: int, max_lexer_states: int) -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=1000,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=step_lexer_fuel,
        step_max_items=50_000,
        max_lexer_states=max_lexer_states,
        max_grammar_size=50_000,
        verbose_errors=False,
    )


# A lexer state takes one to two kilobytes, a step about a millisecond for each 14,000 units of fuel.
LIMITS = _limits(step_lexer_fuel=200_000, max_lexer_states=20_000)
# The lexer of a choice has at most one state for each byte of the strings, and some for the ends. So none of them can
# fail after it was begun.
CHOICE_LIMITS = _limits(step_lexer_fuel=4_000_000, max_lexer_states=MAX_BYTES + 1000)


class Compiler:
    """Compiles grammars, one at a time, in a thread.

    Args:
        read_vocabulary: returns the model's vocabulary. It is called for the first grammar, because it takes time and
            refuses some tokenizers.
    """

    def __init__(self, read_vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = cache(read_vocabulary)
        self._checked: OrderedDict[bytes, int] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "compile-grammar")
        self._turn = asyncio.Lock()

    async def check(self, grammar: str, cache_salt: str | None = None) -> int:
        """Checks that `matcher` accepts a grammar. The latest grammars that passed are not compiled again.

        Returns:
            The number of tokens of a short text of the grammar (see `EndFinder`): an answer needs them.

        Args:
            cache_salt: a grammar that passed is known with the same salt only, so that a client cannot infer from the
                time of an answer which grammars other clients use.

        Raises:
            StructureError: see `matcher`.
        """
        key = sha256(f"{cache_salt}\0{grammar}".encode()).digest()
        async with self._turn:
            if key not in self._checked:
                _, self._checked[key] = await self._compiled(grammar)
            self._checked.move_to_end(key)
            if len(self._checked) > MAX_CHECKED:
                self._checked.popitem(last=False)
            return self._checked[key]

    async def matcher(self, grammar: str) -> Matcher:
        """Returns a matcher of one answer, at the beginning of its text. It shares nothing with other matchers.

        Raises:
            StructureError: the engine does not accept the grammar or this model's tokenizer, the grammar admits no text
                of its tokens, no end of its texts is found, or its compilation exceeds a limit.
        """
        async with self._turn:
            matcher, _ = await self._compiled(grammar)
            return matcher

    async def _compiled(self, grammar: str) -> tuple[Matcher, int]:
        loop = asyncio.get_running_loop()
        vocabulary = await loop.run_in_executor(self._thread, self._vocabulary)
        compiling = loop.run_in_executor(self._thread, _begun, grammar, vocabulary)
        try:
            async with asyncio.timeout(COMPILE_S):
                return await asyncio.shield(compiling)
        except TimeoutError:
            raise StructureError("it takes too long to compile; make it simpler") from None


def _begun(grammar: str, vocabulary: Vocabulary) -> tuple[Matcher, int]:
    """Compiles a grammar, follows its forced beginning, and returns the number of tokens of a short text, too.

    Raises:
        StructureError: see `Compiler.matcher`.
    """
    matcher = Matcher(partial(_compiled, grammar, vocabulary), vocabulary)
    begun = matcher.after((), CHECKED_TOKENS)
    if begun.end is None:
        raise StructureError("no text of it was found that ends soon; make it simpler or shorter")
    return matcher, len(begun.forced) + len(begun.end)


def _compiled(grammar: str, vocabulary: Vocabulary) -> LLMatcher:
    """Returns a new engine of a grammar. It takes some milliseconds.

    Raises:
        StructureError: see `Compiler.matcher`.
    """
    choice = is_choice(grammar)
    if choice and any(text in grammar for text in vocabulary.special):
        raise StructureError("a string contains the text of a special token of this model, which no answer may contain")
    limits = CHOICE_LIMITS if choice else LIMITS
    engine = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits)
    if engine.is_error():
        raise StructureError(_explained(engine.get_error()))
    return engine


def _explained(error: str) -> str:
    """Returns the reason of an error of the engine. The engine's own message may quote the client's text."""
    if "Unsatisfiable" in error:
        return "the schema admits no value"
    if "Unimplemented keys" in error:
        return "the schema uses a keyword that is not supported (such as not, if, uniqueItems, dependentSchemas)"
    if "regex" in error:
        return "a regular expression is invalid or not supported (look-around and backreferences are not)"
    if "fuel" in error or "too many" in error or "limit" in error or "too big" in error or "too large" in error:
        return "it is too complex; make it simpler"
    return "it is invalid, or the grammar engine does not support it"
