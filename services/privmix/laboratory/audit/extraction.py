"""Measures extraction: whether a service outputs a planted secret (SubMix section 4.2; Carlini et al. 2019).

The attacker knows the text before the secret and requests completions. With the models at hand, the probability of a
secret is exact: the product of its tokens' probabilities under the released distributions. The result does not bound
epsilon; it shows the success of an attack.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from privmix.laboratory.audit.canaries import Canary
from privmix.laboratory.audit.chances import end_of_budget, next_token_chances
from privmix.laboratory.audit.local_models import ModelOutput
from privmix.laboratory.audit.service_client import client
from privmix.privacy.arrays import Reals
from privmix.privacy.protocol import Protocol
from privmix.privacy.settings import Settings

LEAKS = 0.9
"""The minimum hit rate without privacy. With a lower one, the attack is too weak for a conclusion."""


@dataclass(frozen=True)
class ExtractionResult:
    """The result of the attack on one mechanism, over the canaries in the corpus.

    Attributes:
        mechanism: the mechanism's name.
        guarantee: the status of its guarantee.
        epsilon: the claim; None without a claim.
        hit_rate: the probability that at least one of the attempts outputs the whole secret.
        exposure: log2(candidates) - log2(rank of the secret) (Carlini et al. 2019, section 4.2).
        largest_exposure: the exposure of a secret that is the most likely candidate.
        rank: the median rank of the secret among the candidates.
    """

    mechanism: str
    guarantee: str
    epsilon: float | None
    hit_rate: float
    exposure: float
    largest_exposure: float
    rank: float

    def row(self) -> Mapping[str, Any]:
        """Returns the row for the report's table."""
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
    """Returns the fraction of canaries whose secret a running service outputs in at least one attempt.

    Raises:
        httpx.HTTPError: the service does not answer, or refuses.
    """
    hits = 0
    with client(url, api_key) as service:
        for canary in canaries:
            body = {"model": "privmix", "prompt": canary.prompt, "n": attempts, "top_k": top_k}
            answer = service.post("/v1/completions", json={**body, "max_tokens": canary.length}).raise_for_status()
            hits += any(choice["text"].strip().startswith(canary.secret.strip()) for choice in answer.json()["choices"])
    return hits / len(canaries)


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
) -> ExtractionResult:
    """Attacks one mechanism with every canary.

    Args:
        outputs: for each canary, the models' outputs on its candidates, the true secret first.
        models: for each canary, the indices of the models that serve as the mechanism's parts.
        attempts: the number of completions per canary.
        draws: the number of releases to average if releases vary.
        settings: the settings of the budget. If the cost depends on the text, every attempt has a full budget.
    """
    scores = [
        log_chances(protocol, answers, models[canary], canary.length, draws, settings)
        for canary, answers in outputs.items()
    ]
    chances = np.array([np.exp(candidate_scores[0]) for candidate_scores in scores])
    ranks = np.array([rank(candidate_scores) for candidate_scores in scores])
    candidates = len(scores[0])
    return ExtractionResult(
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
    """Returns the log-probability of each candidate, the sum over its tokens, float64 [candidates]."""
    end = end_of_budget(settings, protocol, outputs, models, length)
    chances = next_token_chances(protocol, outputs, models, draws, end)
    with np.errstate(divide="ignore"):
        return np.asarray(np.log(chances).reshape(-1, length).sum(axis=1))


def rank(scores: Reals) -> float:
    """Returns the rank of the first score among all; 1 is the best. Equal scores share the mean of their ranks."""
    others = scores[1:]
    return float(1 + (others > scores[0]).sum() + (others == scores[0]).sum() / 2)


def too_weak(results: Sequence[ExtractionResult]) -> bool:
    """Tells whether the attack fails even without privacy, so that its failure with privacy proves nothing."""
    return max((result.hit_rate for result in results if result.epsilon is None), default=0.0) < LEAKS
