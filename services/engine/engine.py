"""The one interface behind which a base model and its adapters answer next-token queries."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from pkgutil import resolve_name
from typing import Literal

import torch

from services.engine import ENGINES, known_engine

PUBLIC = "public"
"""The name under which the base model, without any adapter, is asked."""

ZERO = "zero"
"""The name of an adapter whose weights are all zero, which every engine has: its row equals the public row, and
computing it costs what the row of any other adapter costs. It is the only name that a request may repeat."""

Attention = Literal["public", "own"]
"""Whose keys and values an adapter attends to: the public model's (the adapter is a reader), or its own."""


class EngineStalledError(RuntimeError):
    """The engine makes no progress with what it was asked. That is dropped; the engine should be replaced."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence, asked of several models at once.

    Attributes:
        sequence: identifies the live sequence; caches are kept under it until `Engine.release`.
        tokens: the whole context, prompt and output so far.
        adapters: the models wanted, `PUBLIC` among them where the public row is wanted. Only `ZERO` may be repeated.
        cache_salt: sequences share cached prefixes only with sequences of the same salt. Two clients with different
            salts cannot learn from the time of an answer what the other one asked.
    """

    sequence: str
    tokens: tuple[int, ...]
    adapters: tuple[str, ...]
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What an engine is built from.

    Attributes:
        kind: a name in `ENGINES`.
        context_length: the prompt and every output token, in tokens.
        attention: "public" serves any number of readers, "own" one plain LoRA adapter with a cache of its own.
    """

    model: Path
    kind: str = "vllm"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    context_length: int = 2048
    cache_gib: float = 2.0
    gpu_memory_utilization: float = 0.9
    attention: Attention = "public"
    adapters: Mapping[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (PUBLIC, ZERO):
            if name in self.adapters:
                raise ValueError(f"adapters: the name {name!r} is the engine's own; rename that adapter")


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """A PEFT adapter directory, and whose keys and values the adapter attends to (`Manifest.attention`)."""

    path: Path
    attention: Attention


class Engine(ABC):
    """Next-token distributions of a base model plus LoRA adapters. Not thread-safe: one caller at a time."""

    vocabulary: int
    context_length: int
    adapters: tuple[str, ...]

    def next_token(self, requests: Sequence[Request]) -> torch.Tensor:
        """Log-probabilities of the token that follows each context, under each model asked.

        Returns:
            float32 [rows, vocabulary] on the engine's device: the rows of the first request in the order of its
            `adapters`, then those of the second, and so on.

        Raises:
            ValueError: an empty or over-long context, a token outside the vocabulary, an unknown adapter, or the same
                sequence twice. Nothing has been computed then.
            EngineStalledError: no progress is made.
        """
        self._check(requests)
        return self._next_token(requests)

    @abstractmethod
    def prepare(self, adapters: Sequence[str]) -> None:
        """Bring the adapters that the coming steps ask for to the device ahead of time.

        A hint: it never fails, names that are not loaded are ignored, and only the time of later steps depends on it.
        """

    @abstractmethod
    def release(self, sequence: str) -> None:
        """Drop every cache of the sequence. Unknown sequences are no error: a release may be repeated."""

    @abstractmethod
    def close(self) -> None:
        """Give back the device's memory."""

    @abstractmethod
    def _next_token(self, requests: Sequence[Request]) -> torch.Tensor: ...

    def _check(self, requests: Sequence[Request]) -> None:
        known = {PUBLIC, ZERO, *self.adapters}
        for request in requests:
            length, limit = len(request.tokens), self.context_length - 1
            if not 0 < length <= limit:
                raise ValueError(f"tokens: a context has between 1 and {limit} tokens here, got {length}")
            if not 0 <= min(request.tokens) <= max(request.tokens) < self.vocabulary:
                raise ValueError(f"tokens: every token id lies in [0, {self.vocabulary})")
            if unknown := set(request.adapters) - known:
                raise ValueError(f"adapters: not loaded here: {', '.join(sorted(unknown))}")
            named = [name for name in request.adapters if name != ZERO]
            if len(set(named)) != len(named):
                raise ValueError("adapters: each model is asked once a request")
        if len({request.sequence for request in requests}) != len(requests):
            raise ValueError("sequence: the same sequence stands twice in one call")


def create(settings: EngineSettings) -> Engine:
    """Returns a new engine of the kind that `settings.kind` names in `ENGINES`."""
    engine: Engine = resolve_name(ENGINES[known_engine(settings.kind)])(settings)
    return engine
