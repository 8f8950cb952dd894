"""Measures extraction: whether a service outputs a planted secret (SubMix section 4.2; Carlini et al. 2019).

The attacker knows the text before the secret and requests completions. With the models at hand, the probability of a
secret is exact: the product of its tokens' probabilities under the released distributions. The result does not bound
epsilon; it shows the success of an attack.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from privmix.foundation.errors import InputError
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
        hits: the expected fraction of attempts that output it, as SubMix counts them.
        log_chance: the mean log-probability of a whole secret, in nats.
    """

    mechanism: str
    guarantee: str
    epsilon: float | None
    hit_rate: float
    hits: float
    log_chance: float


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
        try:
            protocol = settings.plan(testbed.parts)
        except ValueError as error:
            raise InputError(f"epsilon: {settings.protocol} at {settings.epsilon}: {error}") from error
        models = dict.fromkeys(secrets, testbed.models(protocol))
        yield attack(name, settings, protocol, outputs, models, attempts=attempts, draws=draws)


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
        outputs: for each canary, the models' outputs on its secret.
        models: for each canary, the indices of the models that serve as the mechanism's parts.
        attempts, draws: see `attack_all`.
    """
    logs = np.array([log_chance(settings, protocol, own, models[canary], draws) for canary, own in outputs.items()])
    return Extraction(
        mechanism=mechanism,
        guarantee=protocol.guarantee.status,
        epsilon=0.0 if protocol.rows == 0 else settings.epsilon,
        hit_rate=float((-np.expm1(attempts * np.log1p(-np.minimum(np.exp(logs), 1 - 1e-12)))).mean()),
        hits=float(np.exp(logs).mean()),
        log_chance=float(logs.mean()),
    )


def log_chance(
    settings: Settings, protocol: Protocol, outputs: ModelOutput, models: Sequence[int], draws: int
) -> float:
    """Returns the log-probability of a secret, the sum over its tokens.

    Every attempt has a full budget. The public model answers after its end.
    """
    varies = protocol.noisy or protocol.draws((protocol.models,)).keys() != {(protocol.models,)}
    chances = [_chances(settings, protocol, outputs, models) for _ in range(draws if varies else 1)]
    with np.errstate(divide="ignore"):
        return float(np.log(np.mean(chances, axis=0)).sum())


def _chances(settings: Settings, protocol: Protocol, outputs: ModelOutput, models: Sequence[int]) -> Reals:
    """Returns the probability of each token of a secret, as a service releases it, float64 [tokens]."""
    public, wanted = outputs.public, outputs.wanted
    rows = outputs.models[list(models)].transpose(0, 1).flatten(0, 1)
    answers = shape(public, rows, [tuple(range(protocol.models))] * len(public))
    trial = Trial(settings, protocol, len(public), released=len(public), bounds=False)
    trial.add(answers, Targets(wanted, np.zeros(len(wanted), np.int64), np.ones(len(wanted), np.bool_)))
    return trial.chances


def is_strong(results: Sequence[Extraction]) -> bool:
    """Tells whether the attack succeeds without privacy, so that its failure with privacy shows something."""
    return max((result.hit_rate for result in results if result.epsilon is None), default=0.0) >= LEAKS
