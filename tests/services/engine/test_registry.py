"""Claim: a new engine needs one class and one line in `ENGINES`; then configuration and `create` accept its name."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from privmix.engine import ENGINES
from privmix.engine.engine import PUBLIC, ComingRow, Engine, EngineSettings, Request, create
from privmix_cluster.configuration import EngineSection


class Uniform(Engine):
    """Gives every token of a vocabulary of four the same probability."""

    def __init__(self, settings: EngineSettings) -> None:
        self.vocabulary, self.context_length, self.adapters = 4, settings.context_length, tuple(settings.adapters)

    def prepare(self, rows: Sequence[ComingRow]) -> None: ...
    def drop_caches(self, sequence: str) -> None: ...
    def close(self) -> None: ...

    def _logits(self, requests: Sequence[Request]) -> torch.Tensor:
        return torch.zeros(sum(len(request.adapters) for request in requests), self.vocabulary).log_softmax(-1)


def test_a_new_engine_is_configured_and_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("privmix.engine.ENGINES", {**ENGINES, "uniform": f"{__name__}:Uniform"})
    monkeypatch.setattr("privmix.engine.engine.ENGINES", {**ENGINES, "uniform": f"{__name__}:Uniform"})
    kind = EngineSection(kind="uniform").kind
    engine = create(EngineSettings(Path("no-model"), kind, context_length=8))
    assert engine.next_token([Request("a", (1, 2), (PUBLIC,))]).exp().tolist() == [[0.25] * 4]


def test_an_unknown_engine_is_refused_with_the_known_names() -> None:
    with pytest.raises(ValidationError, match="must be one of vllm, transformers, not 'tgi'"):
        EngineSection(kind="tgi")
