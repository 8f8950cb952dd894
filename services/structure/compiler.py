"""Compiles grammars against a model's vocabulary, within limits of time and memory, and keeps the latest ones."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import sha256

from llguidance import LLMatcher, LLParserLimits

from services.structure.errors import StructureError
from services.structure.matcher import Matcher
from services.structure.vocabulary import Vocabulary

COMPILE_S = 10.0
"""The limit of a compilation. The limits below end almost every one in less than 0.3 s."""
CHECKED_TOKENS = 4096
"""The length up to which the forced beginning of a grammar is computed, to see whether it leads to a text."""
MAX_GRAMMARS = 64
MAX_GRAMMAR_BYTES = 2**20
"""The limit of the text of all grammars that are kept."""

# A lexer state takes one to two kilobytes, a step about a millisecond for each 14,000 units of fuel.
LIMITS = LLParserLimits(
    max_items_in_row=1000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=200_000,
    step_max_items=50_000,
    max_lexer_states=20_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)


class Compiler:
    """Returns matchers of grammars. Compiles one grammar at a time, in a thread.

    Args:
        read_vocabulary: returns the model's vocabulary. It is called for the first grammar, because it takes time and
            refuses some tokenizers.
    """

    def __init__(self, read_vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = cache(read_vocabulary)
        self._compiled: OrderedDict[bytes, tuple[int, LLMatcher]] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, "compile-grammar")
        self._turn = asyncio.Lock()

    async def matcher(self, grammar: str, cache_salt: str | None = None) -> Matcher:
        """Returns a matcher at the beginning of a text.

        Args:
            cache_salt: a grammar that is kept is found with the same salt only, so that a client cannot infer from the
                time of an answer which grammars other clients use.

        Raises:
            StructureError: the engine does not accept the grammar or this model's tokenizer, the grammar admits no text
                of its tokens, or its compilation exceeds a limit.
        """
        key = sha256(f"{cache_salt}\0{grammar}".encode()).digest()
        async with self._turn:
            if key not in self._compiled:
                loop = asyncio.get_running_loop()
                vocabulary = await loop.run_in_executor(self._thread, self._vocabulary)
                compiling = loop.run_in_executor(self._thread, _compiled, grammar, vocabulary)
                try:
                    async with asyncio.timeout(COMPILE_S):
                        compiled = await asyncio.shield(compiling)
                except TimeoutError:
                    raise StructureError("it takes too long to compile; make it simpler") from None
                self._keep(key, len(grammar), compiled)
        self._compiled.move_to_end(key)
        return Matcher(self._compiled[key][1], self._vocabulary())

    def _keep(self, key: bytes, size: int, compiled: LLMatcher) -> None:
        """Adds a grammar and drops those that were not used for the longest time, beyond the limits."""
        self._compiled[key] = size, compiled
        total = sum(size for size, _ in self._compiled.values())
        while len(self._compiled) > MAX_GRAMMARS or (total > MAX_GRAMMAR_BYTES and len(self._compiled) > 1):
            _, (dropped, _) = self._compiled.popitem(last=False)
            total -= dropped


def _compiled(grammar: str, vocabulary: Vocabulary) -> LLMatcher:
    """Compiles a grammar and follows its forced beginning.

    Raises:
        StructureError: see `Compiler.matcher`.
    """
    matcher = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=LIMITS)
    if matcher.is_error():
        raise StructureError(_explained(matcher.get_error()))
    Matcher(matcher, vocabulary).after((), CHECKED_TOKENS)
    return matcher


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
