"""Membership inference by the likelihood-ratio attack, LiRA (Carlini et al. 2022), on shadow ensembles.

Each ensemble in turn is attacked with what the others teach about a user's score: one normal distribution where the
user was in, one where the user was not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from services.audit.report.roc import Roc
from services.audit.worlds.chances import end_of_budget, next_token_chances
from services.audit.worlds.models import ModelOutput
from services.audit.worlds.shadow_ensembles import Shadows
from services.privacy.protocol import Protocol
from services.privacy.settings import Settings
from services.privacy.worlds import Reals

# Of the scores' standard deviation, where there are too few to estimate it.
_LEAST_DEVIATION = 1e-6


@dataclass(frozen=True)
class Seen:
    """What the attacker sees of one mechanism.

    Attributes:
        tokens: that are asked for about each user, in rounds over the places of the user's text; None where the
            attacker sees the probabilities themselves, which no service shows.
        settings: of the budget; where what it costs depends on the text, the public model answers from its end.
    """

    protocol: Protocol
    tokens: int | None = None
    settings: Settings | None = None

    def rounds(self, places: int) -> int:
        """How often each place is asked about."""
        return max(1, (self.tokens or 0) // places)

    def chances(self, outputs: ModelOutput, models: Sequence[int], draws: int) -> Reals:
        """Of each token of a text, float64 [places]: how likely an answer there is the text's own token."""
        places = len(outputs.wanted)
        end = end_of_budget(self.settings, self.protocol, outputs, models, places, self.rounds(places))
        return next_token_chances(self.protocol, outputs, models, draws, end)

    def score(self, chances: Reals) -> float:
        """Of a text, from the chance of each of its tokens: their mean log-chance, or how often they come."""
        if self.tokens is None:
            return float(np.log(np.maximum(chances, 1e-9)).mean())
        rounds = self.rounds(len(chances))
        return float(np.random.default_rng().binomial(rounds, chances).mean() / rounds)


def scores(seen: Seen, shadows: Shadows, draws: int) -> Reals:
    """float64 [shadows, users]: the score of each user's text by what each ensemble releases."""
    found = np.empty(shadows.included.shape)
    for shadow in range(len(found)):
        models = shadows.models(shadow, seen.protocol)
        for user, outputs in enumerate(shadows.outputs):
            found[shadow, user] = seen.score(seen.chances(outputs, models, draws))
    return found


def lira(scored: Reals, included: NDArray[np.bool_]) -> tuple[Reals, Reals]:
    """Log-likelihood ratios of members and of others, each ensemble attacked with the rest.

    With few shadows a variance for each user is worse than one for all (Carlini et al. 2022, section VI).
    """
    ratios = np.full(scored.shape, np.nan)
    for target in range(len(scored)):
        rest = np.arange(len(scored)) != target
        inside, outside = (np.where(included[rest] == side, scored[rest], np.nan) for side in (True, False))
        known = (~np.isnan(inside)).any(axis=0) & (~np.isnan(outside)).any(axis=0)
        means = [np.nanmean(side[:, known], axis=0) for side in (inside, outside)]
        residuals = [side[:, known] - mean for side, mean in zip((inside, outside), means, strict=True)]
        deviations = [max(float(np.nanstd(each)), _LEAST_DEVIATION) for each in residuals]
        own = scored[target, known]
        ratios[target, known] = norm.logpdf(own, means[0], deviations[0]) - norm.logpdf(own, means[1], deviations[1])
    valid = ~np.isnan(ratios)
    return ratios[valid & included], ratios[valid & ~included]


def attack(mechanisms: Mapping[str, Seen], shadows: Shadows, draws: int) -> dict[str, Roc]:
    """The curve of every mechanism."""
    return {name: Roc.of(*lira(scores(each, shadows, draws), shadows.included)) for name, each in mechanisms.items()}
