"""Extraction: does the service say a secret that was planted in its corpus? (SubMix section 4.2; Carlini et al. 2019)

The attacker knows the text before the secret and asks for what follows. The operator's view is exact: the chance of a
secret is the product of its tokens' under the distributions that the mechanism releases. Nothing of it is a bound on
epsilon; it shows what an attack gets.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx
import numpy as np
import torch

from services.audit.canaries import Canary
from services.audit.models import Said
from services.audit.worlds import NOISY, Reals
from services.evaluation.allowance import Allowance
from services.privacy.protocol import Protocol, Release
from services.privacy.references import Public
from services.privacy.settings import Settings
from services.privacy.shaping import shape

LEAKS = 0.9
"""The hit rate without privacy below which the attack is too weak to say anything."""

End = Callable[[Reals, Reals], None]
"""Changes the chances of one release, of every query, from where a budget ends, by what each query has lost."""

_AT_ONCE = 512


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
    said: Mapping[Canary, Said],
    models: Mapping[Canary, Sequence[int]],
    *,
    attempts: int,
    draws: int,
    settings: Settings | None = None,
) -> Extracted:
    """Ask one mechanism for every canary's secret.

    Args:
        said: for each canary the models' answers on its candidates, the true secret first.
        models: for each canary the models that are the mechanism's parts.
        attempts: completions asked for.
        draws: releases averaged where they differ from each other.
        settings: of the budget; where what it costs depends on the text, every attempt has a whole one.
    """
    scores = [
        log_chances(protocol, answers, models[canary], len(canary.secret), draws, settings)
        for canary, answers in said.items()
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
    protocol: Protocol, said: Said, models: Sequence[int], length: int, draws: int, settings: Settings | None = None
) -> Reals:
    """float64 [candidates]: the log of each one's chance, token by token."""
    texts = [slice(start, start + length) for start in range(0, len(said.wanted), length)]
    end = None
    if settings is not None and protocol.event.measured:
        end = partial(_end, settings, protocol, texts, release_chances(Public(protocol.parts), said, models)[0])
    chances = next_token_chances(protocol, said, models, draws, end)
    with np.errstate(divide="ignore"):
        return np.asarray([np.log(chances[text]).sum() for text in texts])


def next_token_chances(
    protocol: Protocol,
    said: Said,
    models: Sequence[int],
    draws: int,
    end: End | None = None,
) -> Reals:
    """float64 [S]: the chance of the token wanted in each query, over the draws of parts and of noise.

    Args:
        end: of a budget that each draw begins anew.
    """
    repeated = draws if varies(protocol) else 1
    total = np.zeros(len(said.wanted))
    for _ in range(repeated):
        chances, losses = release_chances(protocol, said, models)
        if end is not None and losses is not None:
            end(chances, losses)
        total += chances / repeated
    return total


def _end(
    settings: Settings, protocol: Protocol, texts: Sequence[slice], public: Reals, chances: Reals, losses: Reals
) -> None:
    """Let the public model answer each text from where a budget of its own ends."""
    for text in texts:
        paid = Allowance(settings, protocol).after(losses[text].tolist(), text.stop - text.start)
        rest = slice(text.start + paid, text.stop)
        chances[rest] = public[rest]


def release_chances(protocol: Protocol, said: Said, models: Sequence[int]) -> tuple[Reals, Reals | None]:
    """float64 [S]: the chance of the token wanted in each query as it is released once; and what each has lost."""
    chances, losses = [], []
    for start in range(0, len(said.wanted), _AT_ONCE):
        block = slice(start, start + _AT_ONCE)
        released = release(protocol, said, models, block)
        weights = released.weights.double()
        chances.append((weights.gather(1, said.wanted[block, None])[:, 0] / weights.sum(dim=1)).numpy())
        losses += [] if released.losses is None else [released.losses]
    return np.concatenate(chances), np.concatenate(losses) if losses else None


def release(protocol: Protocol, said: Said, models: Sequence[int], block: slice) -> Release:
    """What is released to each query of a block, once."""
    public, rows = said.public[block], said.models[:, block]
    drawn = [protocol.draw() for _ in range(len(public))]
    asked = [rows[models[part], query] for query, parts in enumerate(drawn) for part in parts]
    parts = torch.stack(asked) if asked else public[:0]
    return protocol.release(shape(public, parts, drawn))


def varies(protocol: Protocol) -> bool:
    """Whether the same query is answered by different distributions."""
    return isinstance(protocol, NOISY) or getattr(protocol, "q", 1.0) < 1


def rank(scores: Reals) -> float:
    """Of the first among all, 1 the best; those that tie share their ranks."""
    others = scores[1:]
    return float(1 + (others > scores[0]).sum() + (others == scores[0]).sum() / 2)


def too_weak(results: Sequence[Extracted]) -> bool:
    """Whether no model without privacy gives its secrets away: then the attack means nothing."""
    return max((each.hit_rate for each in results if each.epsilon is None), default=0.0) < LEAKS
