"""Measures extraction: whether a service outputs a planted secret (SubMix section 4.2; Carlini et al. 2019).

The attacker knows the text before the secret and requests completions. With the models at hand, the probability of a
secret is exact: the product of its tokens' probabilities under the released distributions. The result does not bound
epsilon; it shows the success of an attack.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from privmix.foundation.errors import InputError
from privmix.laboratory.audit.black_box import MODEL, client
from privmix.laboratory.audit.canaries import Canary
from privmix.laboratory.audit.local_models import ModelOutput
from privmix.laboratory.audit.testbed import Testbed
from privmix.laboratory.evaluation.trial import Targets, Trial
from privmix.privacy.arrays import Reals
from privmix.privacy.mollifiers.shaping import shape
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols.ensemble import EnsembleSettings
from privmix.privacy.protocols.finetuned import FinetunedSettings
from privmix.privacy.protocols.public import PublicSettings
from privmix.privacy.settings import Settings

LEAKS = 0.9
"""The minimum hit rate without privacy. With a lower one, the attack is too weak for a conclusion."""


@dataclass(frozen=True)
class Extraction:
    """The result of the attack on one mechanism, over the canaries in the corpus.

    Attributes:
        mechanism: the mechanism's name.
        guarantee: the status of its guarantee.
        epsilon: the budget; 0 for the public model, None without privacy.
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


def attack_all(
    testbed: Testbed, subjects: Sequence[tuple[str, Settings]], *, attempts: int, draws: int
) -> Iterator[Extraction]:
    """Attacks the models without privacy, and then every protocol, with the canaries in the corpus.

    Args:
        subjects: the name of each protocol, and its settings.
        attempts: the number of completions per canary.
        draws: the number of releases to average if releases vary.

    Raises:
        InputError: no secret is in the corpus, the budget leaves a protocol nothing, or the testbed lacks its models.
    """
    secrets = testbed.canaries
    if not secrets:
        raise InputError("planted: the coins included no secret; plant more of them, in another --directory")
    parts, whole = range(testbed.parts), (testbed.parts,)
    references: Sequence[tuple[str, Settings, Mapping[Canary, Sequence[int]]]] = (
        ("public model", PublicSettings(), dict.fromkeys(secrets, parts)),
        ("one model of the whole corpus", FinetunedSettings(), dict.fromkeys(secrets, whole)),
        ("the part that has the secret", FinetunedSettings(), {each: (testbed.part[each],) for each in secrets}),
        ("ensemble, without privacy", EnsembleSettings(), dict.fromkeys(secrets, parts)),
    )
    outputs = {canary: testbed.outputs[canary] for canary in secrets}
    for name, settings, models in references:
        protocol = settings.plan(1 if settings.one_model else testbed.parts)
        yield attack(name, settings, protocol, outputs, models, attempts=attempts, draws=draws)
    for name, settings in subjects:
        protocol = planned(settings, testbed.parts)
        models = dict.fromkeys(secrets, testbed.models(protocol))
        yield attack(name, settings, protocol, outputs, models, attempts=attempts, draws=draws)


def planned(settings: Settings, parts: int) -> Protocol:
    """Plans a protocol for its budget. Raises `InputError` if the budget leaves it nothing."""
    try:
        return settings.plan(parts)
    except ValueError as error:
        raise InputError(f"epsilon: {settings.protocol} at {settings.epsilon}: {error}") from error


def attack(
    mechanism: str,
    settings: Settings,
    protocol: Protocol,
    outputs: Mapping[Canary, ModelOutput],
    models: Mapping[Canary, Sequence[int]],
    *,
    attempts: int,
    draws: int,
) -> Extraction:
    """Attacks one mechanism with every canary.

    Args:
        outputs: for each canary, the models' outputs on its candidates, the true secret first.
        models: for each canary, the indices of the models that serve as the mechanism's parts.
        attempts, draws: see `attack_all`.
    """
    scores = [
        log_chances(settings, protocol, answers, models[canary], canary.length, draws)
        for canary, answers in outputs.items()
    ]
    chances = np.array([np.exp(of_candidates[0]) for of_candidates in scores])
    ranks = np.array([rank(of_candidates) for of_candidates in scores])
    candidates = len(scores[0])
    return Extraction(
        mechanism=mechanism,
        guarantee=protocol.guarantee.status,
        epsilon=0.0 if protocol.rows == 0 else settings.epsilon,
        hit_rate=float((-np.expm1(attempts * np.log1p(-np.minimum(chances, 1 - 1e-12)))).mean()),
        exposure=float((np.log2(candidates) - np.log2(ranks)).mean()),
        largest_exposure=float(np.log2(candidates)),
        rank=float(np.median(ranks)),
    )


def log_chances(
    settings: Settings, protocol: Protocol, outputs: ModelOutput, models: Sequence[int], length: int, draws: int
) -> Reals:
    """Returns the log-probability of each candidate, the sum over its tokens, float64 [candidates].

    Every attempt has a full budget. The public model answers after its end.
    """
    varies = protocol.noisy or protocol.draws((protocol.models,)).keys() != {(protocol.models,)}
    repeated = draws if varies else 1

    def log_chance(text: slice) -> float:
        chances = [_chances(settings, protocol, outputs, models, text) for _ in range(repeated)]
        with np.errstate(divide="ignore"):
            return float(np.log(np.mean(chances, axis=0)).sum())

    return np.array([log_chance(slice(start, start + length)) for start in range(0, len(outputs.wanted), length)])


def _chances(settings: Settings, protocol: Protocol, outputs: ModelOutput, models: Sequence[int], text: slice) -> Reals:
    """Returns the probability of each token of a text, as a service releases it, float64 [tokens]."""
    public, wanted = outputs.public[text], outputs.wanted[text]
    rows = outputs.models[list(models), text].transpose(0, 1).flatten(0, 1)
    answers = shape(public, rows, [tuple(range(protocol.models))] * len(public))
    trial = Trial(settings, protocol, len(public), released=len(public), bounds=False)
    trial.add(answers, Targets(wanted, np.zeros(len(wanted), np.int64), np.ones(len(wanted), np.bool_)))
    return trial.chances


def rank(scores: Reals) -> float:
    """Returns the rank of the first score among all; 1 is the best. Equal scores share the mean of their ranks."""
    others = scores[1:]
    return float(1 + (others > scores[0]).sum() + (others == scores[0]).sum() / 2)


def is_strong(results: Sequence[Extraction]) -> bool:
    """Tells whether the attack succeeds without privacy, so that its failure with privacy shows something."""
    return max((result.hit_rate for result in results if result.epsilon is None), default=0.0) >= LEAKS


def over_http(url: str, canaries: Sequence[Canary], attempts: int, top_k: int, api_key: str | None) -> float:
    """Returns the fraction of canaries whose secret a running service outputs in at least one attempt.

    Raises:
        WorkError: the service does not answer, or refuses.
    """
    hits = 0
    with client(url, api_key) as service:
        for canary in canaries:
            body = {"model": MODEL, "prompt": canary.prompt, "n": attempts, "top_k": top_k}
            answer = service.post("/v1/completions", json={**body, "max_tokens": canary.length}).raise_for_status()
            hits += any(choice["text"].strip().startswith(canary.secret.strip()) for choice in answer.json()["choices"])
    return hits / len(canaries)
