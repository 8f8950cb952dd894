"""Extraction: does the service say a secret that was planted in its corpus? (SubMix section 4.2; Carlini et al. 2019)

The attacker knows the text before the secret and asks for what follows. The operator's view is exact: the chance of a
secret is the product of its tokens' under the distributions that the mechanism releases. Nothing of it is a bound on
epsilon; it shows what an attack gets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from services.audit.worlds.canaries import Canary
from services.audit.worlds.chances import end_of_budget, next_token_chances
from services.audit.worlds.models import ModelOutput
from services.privacy.protocol import Protocol
from services.privacy.settings import Settings
from services.privacy.worlds import Reals

LEAKS = 0.9
"""The hit rate without privacy below which the attack is too weak to say anything."""


@dataclass(frozen=True)
class Extracted:
    """What one mechanism gave away, over the canaries that are in the corpus.

    Attributes:
        mechanism: its name.
        guarantee: how far what it promises reaches.
        epsilon: what it claims; None where it claims nothing.
        hit_rate: the chance that one of the attempts says the whole secret.
        exposure: log2 of the number of candidates, less that of the secret's rank (Carlini et al. 2019, section 4.2).
        largest_exposure: what it is where the secret is the likeliest candidate.
        rank: of the secret among the candidates: the median.
    """

    mechanism: str
    guarantee: str
    epsilon: float | None
    hit_rate: float
    exposure: float
    largest_exposure: float
    rank: float

    def row(self) -> Mapping[str, Any]:
        """A row of the report's table."""
        return {
            "mechanism": self.mechanism,
            "guarantee": self.guarantee,
            "epsilon": self.epsilon,
            "hit rate": self.hit_rate,
            "exposure, bits": self.exposure,
            "of at most": self.largest_exposure,
            "median rank": self.rank,
        }


def over_http(url: str, canaries: Sequence[Canary], attempts: int, top_k: int, api_key: str | None) -> float:
    """The share of canaries whose secret one of the attempts says, asked of a running service.

    Raises:
        httpx.HTTPError: the service does not answer, or refuses.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    found = 0
    with httpx.Client(base_url=url, headers=headers, timeout=600) as client:
        for canary in canaries:
            body = {"model": "privmix", "prompt": canary.prompt, "n": attempts, "top_k": top_k}
            answer = client.post("/v1/completions", json={**body, "max_tokens": len(canary.secret)}).raise_for_status()
            found += any(choice["text"].strip().startswith(canary.secret) for choice in answer.json()["choices"])
    return found / len(canaries)


def attack(
    mechanism: str,
    protocol: Protocol,
    epsilon: float | None,
    outputs: Mapping[Canary, ModelOutput],
    models: Mapping[Canary, Sequence[int]],
    *,
    attempts: int,
    draws: int,
    settings: Settings | None = None,
) -> Extracted:
    """Ask one mechanism for every canary's secret.

    Args:
        outputs: for each canary the models' answers on its candidates, the true secret first.
        models: for each canary the models that are the mechanism's parts.
        attempts: completions asked for.
        draws: releases averaged where they differ from each other.
        settings: of the budget; where what it costs depends on the text, every attempt has a whole one.
    """
    scores = [
        log_chances(protocol, answers, models[canary], len(canary.secret), draws, settings)
        for canary, answers in outputs.items()
    ]
    chances = np.array([np.exp(each[0]) for each in scores])
    ranks = np.array([rank(each) for each in scores])
    candidates = len(scores[0])
    return Extracted(
        mechanism=mechanism,
        guarantee=protocol.guarantee.status,
        epsilon=epsilon,
        hit_rate=float((-np.expm1(attempts * np.log1p(-np.minimum(chances, 1 - 1e-12)))).mean()),
        exposure=float((np.log2(candidates) - np.log2(ranks)).mean()),
        largest_exposure=float(np.log2(candidates)),
        rank=float(np.median(ranks)),
    )


def log_chances(
    protocol: Protocol,
    outputs: ModelOutput,
    models: Sequence[int],
    length: int,
    draws: int,
    settings: Settings | None = None,
) -> Reals:
    """float64 [candidates]: the log of each one's chance, token by token."""
    end = end_of_budget(settings, protocol, outputs, models, length)
    chances = next_token_chances(protocol, outputs, models, draws, end)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(chances).reshape(-1, length).sum(axis=1))


def rank(scores: Reals) -> float:
    """Returns the rank of the first score among all, 1 the best; scores that tie share their ranks."""
    others = scores[1:]
    return float(1 + (others > scores[0]).sum() + (others == scores[0]).sum() / 2)


def too_weak(results: Sequence[Extracted]) -> bool:
    """Whether no model without privacy gives its secrets away, so that the attack means nothing."""
    return max((each.hit_rate for each in results if each.epsilon is None), default=0.0) < LEAKS
