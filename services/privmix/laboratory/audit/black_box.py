"""Runs the likelihood-ratio test over HTTP, on the answers of two running services that differ in one part.

The first half of the answers estimates the likelihoods; the second half bounds epsilon.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from privmix.laboratory.audit.finding import CERTAIN, Finding
from privmix.laboratory.audit.likelihood import claims_of, held_out_epsilons
from privmix.laboratory.audit.service_client import client
from privmix.privacy.arrays import Reals
from privmix.privacy.events import Event, from_json

MODEL = "privmix"
_BATCH = {"prompts": 16, "n": 8}


@dataclass(frozen=True)
class RepeatedRequest:
    """The request that the audit repeats. Each answer has one token."""

    prompt: str
    top_k: int = 2
    temperature: float = 1.0


@dataclass(frozen=True)
class ServiceAnswers:
    """The answers of one service, and the event that it states for a token."""

    answers: tuple[str, ...]
    event: Event
    delta: float


def audit(present: ServiceAnswers, absent: ServiceAnswers, confidence: float) -> Finding:
    """Compares the answers with the claim of the service that has the part."""
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
    return Finding(
        attack="likelihood-ratio test over HTTP",
        subject=str(present.event.kind),
        status=present.event.guarantee.status,
        claims=_claims(present.event, present.delta),
        delta=present.delta,
        lower=lower,
        confidence=confidence,
        certain=certain,
        details={
            "adjacency": present.event.adjacency,
            "tokens": 1,
            "trials": min(len(present.answers), len(absent.answers)),
            "event": present.event.to_json(),
        },
    )


def _claims(event: Event, delta: float) -> Mapping[str, float]:
    """Returns what the event claims for one token. Accounts bound all tokens together, and each token besides."""
    claims = claims_of(event, 1, delta)
    return {**claims, "one token": event.token_epsilon} if event.accounts else claims


def collect_answers(url: str, question: RepeatedRequest, count: int, api_key: str | None) -> ServiceAnswers:
    """Requests at least ``count`` answers of one token. The service charges each.

    Raises:
        httpx.HTTPError: the service does not answer, or refuses.
    """
    answers: list[str] = []
    with client(url, api_key) as service:
        statement: Mapping[str, Any] = service.get("/v1/privacy", params={"model": MODEL}).raise_for_status().json()
        body = {
            "model": MODEL,
            "prompt": [question.prompt] * _BATCH["prompts"],
            "n": _BATCH["n"],
            "max_tokens": 1,
            "top_k": question.top_k,
            "temperature": question.temperature,
        }
        while len(answers) < count:
            answer = service.post("/v1/completions", json=body).raise_for_status().json()
            answers += [choice["text"] for choice in answer["choices"]]
    return ServiceAnswers(tuple(answers), from_json(json.dumps(statement["event"])), float(statement["delta"]))
