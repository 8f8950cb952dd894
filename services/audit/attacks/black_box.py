"""The likelihood-ratio test over HTTP: two running services, of which one part differs, and the tokens they answer.

What the likelihoods are is learnt from the first half of the answers, and epsilon is bounded on the second.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np

from services.audit.attacks.likelihood import claims_of, held_out_epsilons
from services.audit.report.finding import CERTAIN, Finding
from services.privacy.events import Event, from_json
from services.privacy.worlds import Reals

MODEL = "privmix"
_BATCH = {"prompts": 16, "n": 8}


@dataclass(frozen=True)
class Question:
    """What is asked, over and over: one token of each answer."""

    prompt: str
    top_k: int = 2
    temperature: float = 1.0


@dataclass(frozen=True)
class Asked:
    """What one service answered, and what it says that a token costs."""

    answers: tuple[str, ...]
    event: Event
    delta: float


def audit(present: Asked, absent: Asked, confidence: float) -> Finding:
    """What the answers prove against the claim of the service that has the part."""
    values = sorted({*present.answers, *absent.answers})
    halves = [np.array_split(np.array([values.index(one) for one in each.answers]), 2) for each in (present, absent)]
    # Laplace's rule keeps what was never seen from being held impossible.
    learnt = [np.bincount(half[0], minlength=len(values)) + 1.0 for half in halves]
    ratio = np.log(learnt[0] / learnt[0].sum()) - np.log(learnt[1] / learnt[1].sum())
    scores: list[Reals] = [ratio[half[1]] for half in halves]
    lower, certain = held_out_epsilons(scores[0], scores[1], present.delta, (confidence, CERTAIN))
    return Finding(
        attack="likelihood-ratio test over HTTP",
        subject=str(present.event.kind),
        status=present.event.guarantee.status,
        claims=claims_of(present.event, 1, present.delta),
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


def ask(url: str, question: Question, count: int, api_key: str | None) -> Asked:
    """At least ``count`` answers of one token; each is charged.

    Raises:
        httpx.HTTPError: the service does not answer, or refuses.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    answers: list[str] = []
    with httpx.Client(base_url=url, headers=headers, timeout=600) as client:
        stated: Mapping[str, Any] = client.get("/v1/privacy", params={"model": MODEL}).raise_for_status().json()
        body = {
            "model": MODEL,
            "prompt": [question.prompt] * _BATCH["prompts"],
            "n": _BATCH["n"],
            "max_tokens": 1,
            "top_k": question.top_k,
            "temperature": question.temperature,
        }
        while len(answers) < count:
            answer = client.post("/v1/completions", json=body).raise_for_status().json()
            answers += [choice["text"] for choice in answer["choices"]]
    return Asked(tuple(answers), _event(stated), float(stated["delta"]))


def _event(stated: Mapping[str, Any]) -> Event:
    return from_json(json.dumps(stated["event"]))
