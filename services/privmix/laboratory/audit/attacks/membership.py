"""Infers membership by the likelihood-ratio attack, LiRA (Carlini et al. 2022), on shadow ensembles.

Attacks each ensemble in turn. The other ensembles give two normal distributions of a user's score: one of ensembles
with the user, one of ensembles without.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from privmix.laboratory.audit.report.roc import Roc
from privmix.laboratory.audit.worlds.chances import end_of_budget, next_token_chances
from privmix.laboratory.audit.worlds.models import ModelOutput
from privmix.laboratory.audit.worlds.shadow_ensembles import Shadows
from privmix.privacy.arrays import Reals
from privmix.privacy.protocol import Protocol
from privmix.privacy.settings import Settings

# The minimum standard deviation of the scores, for samples too small to estimate it.
_LEAST_DEVIATION = 1e-6


@dataclass(frozen=True)
class Observation:
    """What the attacker observes of one mechanism.

    Attributes:
        tokens: the number of requested tokens per user, in rounds over the positions of the user's text. None: the
            attacker observes the probabilities themselves, which no service shows.
        settings: the settings of the budget. If the cost depends on the text, the public model answers after its end.
    """

    protocol: Protocol
    tokens: int | None = None
    settings: Settings | None = None

    def rounds(self, places: int) -> int:
        """Returns the number of requests per position."""
        return max(1, (self.tokens or 0) // places)

    def chances(self, outputs: ModelOutput, models: Sequence[int], draws: int) -> Reals:
        """Returns the probability that an answer is the text's own token, at each position, float64 [places]."""
        places = len(outputs.wanted)
        end = end_of_budget(self.settings, self.protocol, outputs, models, places, self.rounds(places))
        return next_token_chances(self.protocol, outputs, models, draws, end)

    def score(self, chances: Reals) -> float:
        """Returns the score of a text: its tokens' mean log-probability, or their frequency in sampled answers."""
        if self.tokens is None:
            return float(np.log(np.maximum(chances, 1e-9)).mean())
        rounds = self.rounds(len(chances))
        return float(np.random.default_rng().binomial(rounds, chances).mean() / rounds)


def scores(observation: Observation, shadows: Shadows, draws: int) -> Reals:
    """Scores each user's text by the releases of each ensemble, float64 [shadows, users]."""
    scored = np.empty(shadows.included.shape)
    for shadow in range(len(scored)):
        models = shadows.models(shadow, observation.protocol)
        for user, outputs in enumerate(shadows.outputs):
            scored[shadow, user] = observation.score(observation.chances(outputs, models, draws))
    return scored


def lira(scored: Reals, included: NDArray[np.bool_]) -> tuple[Reals, Reals]:
    """Returns the log-likelihood ratios of members and of non-members; attacks each ensemble with the others.

    Shares one variance among users, which is better with few shadows (Carlini et al. 2022, section VI).
    """
    ratios = np.full(scored.shape, np.nan)
    for target in range(len(scored)):
        rest = np.arange(len(scored)) != target
        inside, outside = (np.where(included[rest] == side, scored[rest], np.nan) for side in (True, False))
        known = (~np.isnan(inside)).any(axis=0) & (~np.isnan(outside)).any(axis=0)
        means = [np.nanmean(side[:, known], axis=0) for side in (inside, outside)]
        residuals = [side[:, known] - mean for side, mean in zip((inside, outside), means, strict=True)]
        deviations = [max(float(np.nanstd(residual)), _LEAST_DEVIATION) for residual in residuals]
        own = scored[target, known]
        ratios[target, known] = norm.logpdf(own, means[0], deviations[0]) - norm.logpdf(own, means[1], deviations[1])
    valid = ~np.isnan(ratios)
    return ratios[valid & included], ratios[valid & ~included]


def attack(mechanisms: Mapping[str, Observation], shadows: Shadows, draws: int) -> dict[str, Roc]:
    """Returns the ROC curve of each mechanism."""
    return {
        name: Roc.of(*lira(scores(observation, shadows, draws), shadows.included))
        for name, observation in mechanisms.items()
    }
