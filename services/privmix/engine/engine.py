"""Defines the interface through which a base model and its adapters answer next-token queries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from pkgutil import resolve_name
from typing import Literal

from privmix.engine import ENGINES, PartKind, known_engine
from privmix.foundation.errors import ExtraMissing
from privmix.foundation.lazily import torch

PUBLIC = "public"
"""The name of the base model without an adapter."""

ZERO = "zero"
"""The name of an adapter without private text, which every engine has. Its row costs as much computation as any other
adapter's row. With zero weights it equals the public row; among texts it is a text of zeros. It is the only name that a
request may repeat."""


MAX_ROWS = 1024
"""The maximum number of rows that an engine of plain LoRA adapters computes at once, if one request has no more."""


class EngineStalledError(RuntimeError):
    """The engine makes no progress. It has dropped its requests and should be replaced."""


@dataclass(frozen=True, slots=True)
class Request:
    """Requests the next-token distributions of several models for one sequence.

    Attributes:
        sequence: the id of the live sequence. The engine keeps caches under it until `Engine.drop_caches`.
        tokens: the whole context, prompt and output so far. After the call it may grow at its end, and changes in no
            other way: the same object continues what was read of it.
        adapters: the names of the models to run, with `PUBLIC` for the public row. Only `ZERO` may be repeated.
        cache_salt: sequences share cached prefixes only with sequences of the same salt, so that a client cannot infer
            from response times what a client with another salt has sent.
    """

    sequence: str
    tokens: Sequence[int]
    adapters: tuple[str, ...]
    cache_salt: str | None = None


@dataclass(frozen=True)
class EngineSettings:
    """Configures an engine.

    Attributes:
        kind: a name in `ENGINES`.
        context_length: the maximum number of tokens in a sequence, prompt and output.
        cache_gib: the size of the KV cache on a CPU.
        part_kind: with "lora", each part has a cache of its own (`Engine.logits`).
        rows: the number of part rows that a private request names besides `PUBLIC`, always: vLLM captures decode steps
            of this shape on a GPU. Requests with another number are answered more slowly.
        load_format: "auto" reads the model's weights, "dummy" makes random ones, to measure speed without files.
        tensor_parallel_size: the number of devices over which the engine splits its model; on a CPU, of processes.
        adapters: the directories of the adapters, by name.
    """

    model: Path
    kind: str = "vllm"
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    context_length: int = 2048
    cache_gib: float = 2.0
    gpu_memory_utilization: float = 0.9
    part_kind: PartKind = "reader"
    rows: int = 0
    load_format: Literal["auto", "dummy"] = "auto"
    tensor_parallel_size: int = 1
    adapters: Mapping[str, Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (PUBLIC, ZERO):
            if name in self.adapters:
                raise ValueError(f"adapters: the name {name!r} is reserved; rename that adapter")

    def missing_adapter(self) -> str | None:
        """Returns the name of an adapter whose directory does not exist; None if all exist."""
        return next((name for name, path in self.adapters.items() if not path.is_dir()), None)


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """Holds the directory of an adapter and the kind of part that it is (`Manifest.part_kind`)."""

    path: Path
    part_kind: PartKind


class Engine(ABC):
    """Computes next-token distributions of a base model and its LoRA adapters. Not thread-safe.

    Attributes:
        owners: the adapters that have keys and values of their own: all plain LoRA adapters, and no others.
    """

    vocabulary: int
    context_length: int
    adapters: tuple[str, ...]
    owners: tuple[str, ...] = ()

    def next_token(self, requests: Sequence[Request]) -> torch.Tensor:
        """Computes the log-probabilities of the next token, float32 [rows, vocabulary]; see `logits` for the rest."""
        return torch.log_softmax(self.logits(requests), dim=-1, dtype=torch.float32)

    def logits(self, requests: Sequence[Request]) -> torch.Tensor:
        """Computes the logits of the next token for each request and each of its models.

        An adapter with keys and values of its own must read every token, drawn or not: one that has to catch up would
        show in the duration of a step that it was not drawn before. So a request with any part row computes all rows of
        the engine, of which those that it names are picked; `ZERO` is the public row.

        Returns:
            [rows, vocabulary] on the engine's device, in the type of the head: the rows of the first request in the
            order of its `adapters`, then those of the second, and so on. They may be overwritten by the next call.

        Raises:
            ValueError: a context is empty or too long, a token is outside the vocabulary, an adapter is unknown, or a
                sequence occurs twice. The engine has computed nothing.
            EngineStalledError: the engine makes no progress.
        """
        self._check(requests)
        if not self.owners:
            return self._logits(requests)
        width = 1 + len(self.owners)
        size = max(1, MAX_ROWS // width)
        picked = [self._picked(requests[start : start + size]) for start in range(0, len(requests), size)]
        return picked[0] if len(picked) == 1 else torch.cat(picked)

    def _picked(self, requests: Sequence[Request]) -> torch.Tensor:
        """Computes all rows of each request that names more than the public row, and returns those that are named."""
        names = (PUBLIC, *self.owners)
        row_of = {name: row for row, name in enumerate(names)} | {ZERO: 0}
        whole = [request if request.adapters == (PUBLIC,) else replace(request, adapters=names) for request in requests]
        firsts = accumulate((len(request.adapters) for request in whole), initial=0)
        picked = [
            first + row_of[name]
            for first, request in zip(firsts, requests, strict=False)  # the last sum is no request's
            for name in request.adapters
        ]
        rows = self._logits(whole)
        return rows.index_select(0, torch.tensor(picked, device=rows.device))

    @abstractmethod
    def drop_caches(self, sequence: str) -> None:
        """Drops every cache of the sequence. Ignores unknown sequences, so a release may be repeated."""

    @abstractmethod
    def close(self) -> None:
        """Frees the device's memory."""

    @abstractmethod
    def _logits(self, requests: Sequence[Request]) -> torch.Tensor: ...

    def _unchecked(self, request: Request) -> Sequence[int]:
        """Returns the tokens of a context that no earlier call has checked: by default all."""
        return request.tokens

    def _check(self, requests: Sequence[Request]) -> None:
        known = {PUBLIC, ZERO, *self.adapters}
        for request in requests:
            length, limit = len(request.tokens), self.context_length - 1
            if not 0 < length <= limit:
                raise ValueError(f"tokens: a context has between 1 and {limit} tokens here, got {length}")
            unchecked = self._unchecked(request)
            if not 0 <= min(unchecked) <= max(unchecked) < self.vocabulary:
                raise ValueError(f"tokens: every token id lies in [0, {self.vocabulary})")
            if unknown := set(request.adapters) - known:
                raise ValueError(f"adapters: not loaded here: {', '.join(sorted(unknown))}")
            named = [name for name in request.adapters if name != ZERO]
            if len(set(named)) != len(named):
                raise ValueError("adapters: a request may name each model only once")
        if len({request.sequence for request in requests}) != len(requests):
            raise ValueError("sequence: a call may contain each sequence only once")


def cpu_cache_gib(wanted: float) -> int:
    """Returns the size of a KV cache on a CPU, for which vLLM reads whole GiB."""
    return max(1, round(wanted))


def create(settings: EngineSettings) -> Engine:
    """Returns a new engine of the kind that `settings.kind` names in `ENGINES`.

    Raises:
        ExtraMissing: the engine's library is not installed.
    """
    try:
        engine: Engine = resolve_name(ENGINES[known_engine(settings.kind)])(settings)
    except ModuleNotFoundError as error:
        if missing := ExtraMissing.of(error):
            raise missing from error
        raise
    return engine
