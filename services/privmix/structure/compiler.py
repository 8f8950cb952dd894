"""Compiles grammars against a model's vocabulary, in threads that do not block the service."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial

from llguidance import LLMatcher

from privmix.foundation.turns import Turns
from privmix.structure.ending import EndFinder
from privmix.structure.errors import StructureError, explained
from privmix.structure.limits import engine_limits
from privmix.structure.matcher import Matcher, Position
from privmix.structure.vocabulary import BYTES, Vocabulary

CHECKED_TOKENS = 4096
"""The length up to which the forced beginning of a grammar is computed, to see whether it leads to a text."""
THREADS = 2


@dataclass(frozen=True)
class Begun:
    """Describes an answer that can begin.

    Attributes:
        start: the position at the beginning. It has an end.
        cpu_s: the seconds of a processor that this took.
    """

    grammar: str
    matcher: Matcher
    start: Position
    cpu_s: float


class Compiler:
    """Begins answers. The engine's limits bound what each takes (`limits`).

    Args:
        read_vocabulary: returns the model's vocabulary. It is called for the first grammar, because it takes time and
            refuses some tokenizers.
    """

    def __init__(self, read_vocabulary: Callable[[], Vocabulary]) -> None:
        self._vocabulary = cache(read_vocabulary)
        self._threads = ThreadPoolExecutor(THREADS, "compile-grammar")
        self._turns = Turns(THREADS)

    async def begun(self, make: Callable[[], str], client: str = "") -> Begun:
        """Compiles a grammar for one answer.

        Args:
            make: returns the grammar.
            client: waits for its own compilations, also for those that it no longer wants.

        Raises:
            StructureError: the engine does not accept the grammar or this model's tokenizer, the grammar admits no text
                of its tokens, no end of its texts is found, or a limit is exceeded.
        """
        async with self._turns.turn(client):
            running = asyncio.get_running_loop().run_in_executor(self._threads, self._begun, make)
            try:
                return await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait({running})
                raise

    def _begun(self, make: Callable[[], str]) -> Begun:
        vocabulary = self._vocabulary()
        at = time.thread_time()
        grammar = make()
        matcher, start = begun(grammar, vocabulary)
        return Begun(grammar, matcher, start, time.thread_time() - at)


def begun(grammar: str, vocabulary: Vocabulary) -> tuple[Matcher, Position]:
    """Returns a matcher of one answer, which shares nothing with others, and the position at its beginning.

    Raises:
        StructureError: see `Compiler.begun`.
    """
    ending = partial(EndFinder, partial(compiled, grammar, BYTES), vocabulary, grammar)
    matcher = Matcher(partial(compiled, grammar, vocabulary), vocabulary, ending)
    start = matcher.after((), CHECKED_TOKENS)
    if start.end is None:
        raise StructureError("no text of it was found that ends soon; make it simpler or shorter")
    return matcher, start


def compiled(grammar: str, vocabulary: Vocabulary) -> LLMatcher:
    """Returns a new engine of a grammar. It takes less than a millisecond for most.

    Raises:
        StructureError: see `Compiler.begun`.
    """
    engine = LLMatcher(vocabulary.tokenizer, grammar, log_level=0, limits=engine_limits(grammar))
    if engine.is_error():
        raise StructureError(explained(engine.get_error()))
    return engine
