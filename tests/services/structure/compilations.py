"""Records the grammars that a test compiles."""

import pytest
from llguidance import LLMatcher

from services.structure import compiler
from services.structure.vocabulary import Vocabulary


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Returns a list to which each grammar is added when it is compiled."""
    compiled: list[str] = []
    compile_ = compiler._compiled

    def recording(grammar: str, vocabulary: Vocabulary) -> LLMatcher:
        compiled.append(grammar)
        return compile_(grammar, vocabulary)

    monkeypatch.setattr(compiler, "_compiled", recording)
    return compiled
