"""Runs the likelihood-ratio test over HTTP, on the answers of two running services that differ in one part.

The first half of the answers estimates the likelihoods; the second half bounds epsilon.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from privmix.foundation.errors import WorkError
from privmix.foundation.urls import proxy_before
from privmix.laboratory.audit.bounds import held_out_epsilons
from privmix.laboratory.audit.finding import CERTAIN, Finding
from privmix.privacy.accounting import planning
from privmix.privacy.arrays import Reals
from privmix.privacy.events import Event, from_json

_PROMPTS, _CHOICES = 16, 8
# The time for an answer, because an attack asks for many completions at once.
_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class ServiceAnswers:
    """The answers of one service, and the event that it states for a token."""

    answers: tuple[str, ...]
    event: Event
    delta: float


def collect_answers(url: str, prompt: str, count: int, api_key: str | None) -> ServiceAnswers:
    """Requests at least ``count`` answers of one token to a prompt, with the key, if any. The service charges each.

    An answer is one of the two tokens that are most likely under the public model.

    Raises:
        WorkError: the service does not answer, or refuses.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    behind_proxy = proxy_before(url) is not None
    answers: list[str] = []
    try:
        with httpx.Client(base_url=url, headers=headers, timeout=_TIMEOUT_S, trust_env=behind_proxy) as service:
            statement: Mapping[str, Any] = service.get("/v1/privacy").raise_for_status().json()
            model = service.get("/v1/models").raise_for_status().json()["data"][0]["id"]
            body = {"model": model, "prompt": [prompt] * _PROMPTS, "n": _CHOICES, "max_tokens": 1, "top_k": 2}
            while len(answers) < count:
                answer = service.post("/v1/completions", json=body).raise_for_status().json()
                answers += [choice["text"] for choice in answer["choices"]]
    except httpx.HTTPError as error:
        raise WorkError(f"service {url}: {error}") from error
    return ServiceAnswers(tuple(answers), from_json(json.dumps(statement["event"])), float(statement["delta"]))


def audit(present: ServiceAnswers, absent: ServiceAnswers, confidence: float) -> Finding:
    """Compares the answers with what the service that has the part claims for one token."""
    values = sorted({*present.answers, *absent.answers})
    halves = [
        np.array_split(np.array([values.index(answer) for answer in service.answers]), 2)
        for service in (present, absent)
    ]
    # Laplace's rule of succession: an answer that is absent from the first half keeps a positive probability.
    counts = [np.bincount(first, minlength=len(values)) + 1.0 for first, _ in halves]
    ratio = np.log(counts[0] / counts[0].sum()) - np.log(counts[1] / counts[1].sum())
    scores: list[Reals] = [ratio[second] for _, second in halves]
    lower, certain = held_out_epsilons(scores[0], scores[1], present.delta, (confidence, CERTAIN))
    event = present.event
    claim = planning.cost(event, 1, present.delta).epsilon
    return Finding(
        attack="likelihood-ratio test over HTTP",
        subject=str(event.kind),
        status=event.guarantee.status,
        adjacency=event.adjacency,
        # Accounts bound all tokens together, and each token besides.
        claim=min(claim, event.token_epsilon) if event.accounts else claim,
        delta=present.delta,
        lower=lower,
        confidence=confidence,
        certain=certain,
        details={"trials": min(len(present.answers), len(absent.answers))},
    )
