"""Claim: the front and the recommendation follow from measurements, and rows are those that a service would compute."""

import math
from pathlib import Path

import numpy as np
import pytest

from privmix.foundation.errors import InputError
from privmix.laboratory.evaluation.estimate import Estimate
from privmix.laboratory.evaluation.tuning import (
    TOLERANCE,
    TuningResult,
    candidates,
    front,
    recommend,
    refuse_private,
)
from privmix.privacy.protocol import Protocol
from privmix.privacy.protocols.dp_sgd import DpSgdEvent
from privmix.privacy.protocols.ensemble import EnsembleSettings
from privmix.privacy.protocols.exponential import ExponentialSettings
from privmix.privacy.protocols.pmixed import PMixedSettings
from privmix.privacy.protocols.public import PublicSettings
from privmix.privacy.protocols.submix import SubMixSettings
from privmix.training.corpus import Document
from privmix.training.marks import Marks
from privmix.training.options import TokenBudget

BUDGET = TokenBudget(epsilon=100, delta=1e-5, tokens=100)
"""Too large for exact composition, which would plan each choice in seconds."""


def choice(rows: float, perplexity: float, status: str = "certified", protocol: str = "pmixed") -> TuningResult:
    return TuningResult(
        label=f"{status} {rows:g}",
        ensemble=Path("ensemble"),
        parts=4,
        protocol=protocol,
        parameters={},
        status=status,
        rows=rows,
        perplexity=Estimate.of([perplexity]),
        change=Estimate.of([perplexity / 50]),
    )


PUBLIC = choice(1, 50, protocol="public")
FOUND = [PUBLIC, choice(2, 40), choice(2.5, 41), choice(5, 36), choice(5, 30, "as published"), choice(9, 36.1)]


def test_the_front_has_the_choices_that_no_other_of_the_same_guarantee_beats() -> None:
    assert [FOUND[index] for index in sorted(front(FOUND))] == [FOUND[index] for index in (0, 1, 3, 4)]
    assert front([choice(2, 40), choice(2, 40)]) == {0, 1}
    assert front([choice(2, 40), choice(2, 41, "as published")]) == {0}, (
        "a certified choice does not beat a weaker guarantee"
    )
    assert front([choice(2, 41), choice(2, 40, "as published")]) == {0, 1}


def test_the_cheapest_certified_choice_near_the_best_is_recommended() -> None:
    assert recommend(FOUND) == FOUND[3], "better choices have weaker guarantees"
    near = choice(2, 36 * (1 + 0.9 * TOLERANCE))
    assert recommend([*FOUND, near]) == near
    assert recommend([PUBLIC, choice(2, 49.9)]) == PUBLIC


@pytest.mark.parametrize(
    "protocol",
    [
        PublicSettings().plan(8),
        EnsembleSettings().plan(8),
        SubMixSettings(tokens=100).plan(8),
        PMixedSettings(q=0.25, radius=0.1).plan(8),
        PMixedSettings(mollifier="renyi", q=0.25).plan(8),
        ExponentialSettings(sample=2, radius=0.1).plan(8),
    ],
)
def test_rows_equal_those_of_a_service(protocol: Protocol) -> None:
    """The number of rows is fixed, or its mean is within 6 standard errors of the expected number."""
    rows = np.array([1 + len(protocol.draw()) for _ in range(4000)])
    if protocol.rows is not None:
        assert rows.max() <= 1 + protocol.expected_rows == 1 + protocol.rows
    else:
        assert abs(rows.mean() - 1 - protocol.expected_rows) <= 6 * rows.std() / math.sqrt(len(rows))
    assert PublicSettings().plan(8).expected_rows == 0


def test_the_default_search_is_certified() -> None:
    measured = [settings.plan(2) for settings in candidates(BUDGET, 2, any_guarantee=False)]
    assert {protocol.guarantee.status for protocol in measured} == {"certified"}
    assert {protocol.guarantee.adjacency for protocol in measured} == {"user"}
    names = {protocol.name for protocol in measured}
    assert names == {"public", "pmixed", "exponential", "individual", "adapmixed", "subsample-aggregate"}


def test_other_guarantees_are_searched_on_request() -> None:
    everything = set(candidates(BUDGET, 4, any_guarantee=True))
    certified = set(candidates(BUDGET, 4, any_guarantee=False))
    assert certified < everything
    assert {settings.mollifier for settings in everything - certified} == {"renyi"}  # type: ignore[attr-defined]


def test_no_choice_draws_more_parts_than_are_scored() -> None:
    def names_and_samples(drawn: int) -> list[tuple[str, int | None]]:
        found = candidates(BUDGET, 8, any_guarantee=False, drawn=drawn)
        return [(settings.protocol, getattr(settings, "sample", None)) for settings in found]

    few, every = names_and_samples(4), names_and_samples(8)
    assert [sample for name, sample in few if name == "exponential"] == [1, 2, 4]
    assert {name for name, _ in few} == {"public", "pmixed", "exponential"}
    assert every == names_and_samples(100)
    assert ("adapmixed", None) in every


def test_a_base_leaves_less_for_the_tokens() -> None:
    """Every choice of a budget is planned with what a base leaves of epsilon."""
    base = DpSgdEvent("user", 1.0, 1.0, 12)

    def radii(event: DpSgdEvent | None) -> list[float]:
        found = candidates(BUDGET, 8, any_guarantee=False, base=event)
        return [settings.plan(8).radius for settings in found if isinstance(settings, ExponentialSettings)]

    both = list(zip(radii(base), radii(None), strict=True))
    assert both
    assert all(0 < on_base < alone for on_base, alone in both)


def test_protected_text_is_refused_with_numbers_alone() -> None:
    marks = Marks(bytes(32))
    list(marks.of([Document("ada", "heliotrope")]))
    refuse_private([Document("bob", "something else")], marks, "private.jsonl")
    with pytest.raises(InputError, match=r"1 of its users and 1 of its 2 texts are in private\.jsonl") as refused:
        refuse_private([Document("ada", "mine"), Document("bob", "heliotrope")], marks, "private.jsonl")
    assert "heliotrope" not in str(refused.value)
    assert "ada" not in str(refused.value).split("private.jsonl")[1].split()
