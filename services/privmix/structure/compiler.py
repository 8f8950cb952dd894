"""Compiles grammars against a model's vocabulary, within limits of time and memory."""

import asyncio
import random
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits

from privmix.structure.ending import EndFinder
from privmix.structure.errors import StructureError
from privmix.structure.grammar import is_choice
from privmix.structure.hints import hints_of
from privmix.structure.matcher import Matcher, Position
from privmix.structure.vocabulary import BYTES, Vocabulary

COMPILE_S = 10.0
"""The limit of a compilation. The limits below end almost every one in less than 0.3 s."""
CHECKED_TOKENS = 4096
"""The length up to which the forced beginning of a grammar is computed, to see whether it leads to a text."""
STATES = 20_000
"""The states of a lexer beside those of the grammar's own text."""

PROBES, PROBED = 3, 12
"""The texts that a probe follows, and their sampled tokens."""
ENGINES = 2
"""The engines of an answer: one follows it, and one knows how it can end."""
MAX_ROW = 10_000
"""The items of a parser's row: four for each optional property that may come next."""

T = TypeVar("T")


def limits_of(grammar: str) -> LLParserLimits:
    """Returns the limits of an engine.

    A lexer state takes one to two kilobytes, a step about a millisecond for each 14,000 units of fuel. A literal has a
    state for each byte, so each literal that fits a grammar can be followed to its end. A choice is one terminal, each
    of whose states may hold all of its strings: none of them can fail after it was begun.
    """
    return LLParserLimits(
        max_items_in_row=MAX_ROW,
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=4_000_000 if is_choice(grammar) else 200_000,
        step_max_items=50_000,
        max_lexer_states=STATES + len(grammar.encode()),
        max_grammar_size=50_000,
        verbose_errors=False,
    )


class Compiler:
    """Compiles grammars that passed their trial (`Trials`), one at a time, in threads.

    Args:
        read_vocabulary: returns the model's vocabulary. It is called for the first grammar, because it takes time and
            refuses some tokenizers.
    """

    def __init__(self, read_vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = cache(read_vocabulary)
        self._threads = ThreadPoolExecutor(ENGINES, "compile-grammar")
        self._turn = asyncio.Lock()

    async def matcher(self, grammar: str, start: Position | None = None) -> Matcher:
        """Returns a matcher of one answer, at the beginning of its text. It shares nothing with other matchers.

        Args:
            start: the position at the beginning, as the trial found it (`Tried`). Without it, it is searched again.

        Raises:
            StructureError: the engine does not accept the grammar or this model's tokenizer, the grammar admits no text
                of its tokens, no end of its texts is found, or its compilation exceeds a limit.
        """
        async with self._turn:
            vocabulary = await self._done(self._vocabulary)
            try:
                async with asyncio.timeout(COMPILE_S):
                    if start is None:
                        matcher, _ = await self._done(begun, grammar, vocabulary)
                        return matcher
                    compile_ = partial(compiled, grammar, vocabulary)
                    ending = partial(_ending, grammar, vocabulary, start)
                    engine, finder = await asyncio.gather(self._done(compile_), self._done(ending))
                    return Matcher(_first(engine, compile_), vocabulary, _first(finder, ending), start)
            except TimeoutError:
                raise StructureError("it takes too long to compile; make it simpler") from None

    async def _done(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments))


def begun(grammar: str, vocabulary: Vocabulary) -> tuple[Matcher, Position]:
    """Compiles a grammar, and returns the position at its beginning, too.

    Raises:
        StructureError: see `Compiler.matcher`.
    """
    compile_ = partial(compiled, grammar, vocabulary)
    matcher = Matcher(compile_, vocabulary, partial(_ending, grammar, vocabulary, None))
    start = matcher.after((), CHECKED_TOKENS)
    if start.end is None:
        raise StructureError("no text of it was found that ends soon; make it simpler or shorter")
    return matcher, start


def probe(matcher: Matcher, vocabulary: Vocabulary) -> None:
    """Follows some texts of a grammar, because the engine may reach its limits where the start does not tell.

    Raises:
        StructureError: a text cannot be continued.
    """
    chance = random.Random(PROBES)
    for _ in range(PROBES):
        tokens: tuple[int, ...] = ()
        for _ in range(PROBED):
            position = matcher.after(tokens, CHECKED_TOKENS)
            if position.complete:
                break
            if position.end is None:
                raise StructureError("it is too complex; make it simpler")
            bits = np.unpackbits(np.frombuffer(position.legal, np.uint8), bitorder="little")
            legal = np.flatnonzero(bits[: vocabulary.tokenizer.vocab_size])
            tokens = (*tokens, *position.forced, int(chance.choice(legal)))


def _first(ready: T, make: Callable[[], T]) -> Callable[[], T]:
    """Returns a function that returns what is ready, and after that what it makes."""
    left = [ready]
    return lambda: left.pop() if left else make()


def _ending(grammar: str, vocabulary: Vocabulary, start: Position | None) -> EndFinder:
    letters = None if "<[" in grammar else BYTES  # a token by its number
    finder = EndFinder(
        partial(compiled, grammar, letters or vocabulary), vocabulary, letters, partial(hints_of, grammar)
    )
    if start is not None and start.end is not None:
        finder.know(start.forced, start.end)
    return finder


def compiled(grammar: str, vocabulary: Vocabulary) -> LLMatcher:
    """Returns a new engine of a grammar. It takes some milliseconds.

    Raises:
        StructureError: see `Compiler.matcher`.
    """
    engine = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=limits_of(grammar))
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
