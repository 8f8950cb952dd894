"""Epsilons in exact arithmetic."""

from collections.abc import Mapping

from mpmath import expm1, log, log1p, mp, mpf

from privmix.budget.privacy_budget import PrivacyBudget
from privmix.privacy.events import Event


def exact_epsilon(terms: PrivacyBudget, spent: Mapping[Event, int]) -> mpf:
    """Returns epsilon to 60 digits by Canonne, Kamath & Steinke (2020), Proposition 12.

    Returns 0 if Bretagnolle & Huber's bound on the total variation is below delta.
    """
    with mp.workdps(60):
        rdp = mpf(0)
        for event, count in spent.items():
            rdp += count * mpf(float(event.rdp([terms.order])[0]))
        order, delta = mpf(terms.order), mpf(terms.delta)
        if -expm1(-rdp) < delta**2:
            return mpf(0)
        return rdp + log1p(-1 / order) - log(delta * order) / (order - 1)
