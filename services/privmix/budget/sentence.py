"""States a guarantee in one sentence."""

from collections.abc import Iterable
from dataclasses import replace
from typing import get_args

from privmix.budget.filter import Filter
from privmix.budget.privacy_budget import PrivacyBudget
from privmix.privacy import accounting
from privmix.privacy.events import Event, Guarantee, GuaranteeStatus

DIGITS = 4
"""The decimals of an epsilon that is shown."""

IMPORTED = (
    "the imported parts have no user in common and depend on nothing else private, which their importer states and "
    "nothing has checked"
)
"""What the guarantee of imported parts assumes besides."""

_STATUSES: tuple[str, ...] = get_args(GuaranteeStatus)


def promise_sentence(terms: PrivacyBudget, guarantee: Guarantee, tokens: int | None) -> str:
    """Returns the guarantee in one sentence. `tokens` is the maximum number of tokens, if it is fixed in advance."""
    if (base := terms.base_event) is not None:
        source = f"{guarantee.source}; base: {base.guarantee.source}"
        assumes = tuple(dict.fromkeys((*guarantee.assumes, *base.guarantee.assumes)))
        guarantee = replace(guarantee, source=source, assumes=assumes)
    if terms.imported:
        guarantee = guarantee.provided(IMPORTED)
    return f"{_limited(terms, guarantee, tokens)}{_of_base(terms)}"


def _limited(terms: PrivacyBudget, guarantee: Guarantee, tokens: int | None) -> str:
    if terms.enforced == "measured":
        if guarantee.status == "certified":  # the certified bound is not enforced
            guarantee = replace(guarantee, status="data-dependent", adjacency="part, as published")
        return guarantee.stopped_by_losses(accounting.stated(terms.epsilon), terms.delta)
    return guarantee.sentence(accounting.stated(terms.epsilon), terms.delta, tokens)


def _of_base(terms: PrivacyBudget) -> str:
    if terms.base is None:
        return ""
    cost = accounting.shown(Filter(terms).epsilon({}), DIGITS)
    return f" The base's training, epsilon {cost} alone, is part of it and is charged once."


def promised_epsilon(terms: PrivacyBudget, bound: float) -> float | None:
    """Returns the epsilon that holds: the budget's, or the tokens' cost, rounded up, where they cost more than that.

    They do after an analysis was corrected, and after `Ledger.forfeit`, which charges even beyond the budget.

    Args:
        bound: the epsilon that the filter compares with the budget's.
    """
    if terms.enforced != "bound" or terms.epsilon is None or bound <= terms.epsilon:
        return terms.epsilon
    return accounting.round_up(bound, DIGITS)


def guarantee_sentence(terms: PrivacyBudget, events: Iterable[Event], tokens: int | None, bound: float) -> str:
    """Returns the sentence of the weakest event's guarantee, which covers all events together.

    If the tokens cost more than the budget, it states their actual cost (`promised_epsilon`).
    """
    guarantees = [event.guarantee for event in events]
    if not guarantees and (base := terms.base_event):
        guarantees = [base.guarantee]
    if not guarantees:
        return "Nothing that depends on the private text was released."
    weakest = max(guarantees, key=lambda guarantee: _STATUSES.index(guarantee.status))
    promised = promised_epsilon(terms, bound)
    if promised == terms.epsilon:
        return promise_sentence(terms, weakest, tokens)
    spent = terms.model_copy(update={"epsilon": promised})
    return (
        f"{promise_sentence(spent, weakest, tokens)} The tokens cost more than the budget of "
        f"{accounting.stated(terms.epsilon)}, which is exhausted."
    )
