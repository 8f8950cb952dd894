"""Claim: all compared methods keep to one budget, and the table marks a method that cannot."""

from pathlib import Path

import numpy as np
import pytest

from privmix.foundation.errors import InputError
from privmix.laboratory.evaluation.ensembles import private_training
from privmix.laboratory.evaluation.methods import chosen, dp_sgd, label, private
from privmix.laboratory.evaluation.options import EvaluationOptions
from privmix.laboratory.evaluation.rows import RowReader
from privmix.laboratory.evaluation.trial import run_trials
from privmix.privacy.accounting import planning
from privmix.privacy.protocols.dp_sgd import DpSgdEvent
from privmix.privacy.protocols.ensemble import EnsembleSettings
from privmix.training.manifest import Manifest, PrivateTraining
from privmix.training.options import TokenBudget
from tests.services.laboratory.evaluation.hidden_states import write_rows

PARTS = 16


def budget(epsilon: float) -> TokenBudget:
    return TokenBudget(epsilon=epsilon, delta=1e-5, tokens=1024)


@pytest.mark.parametrize("epsilon", [2.0, 8.0])
def test_every_method_of_a_table_keeps_to_the_budget(epsilon: float) -> None:
    methods = list(private(budget(epsilon), PARTS, halves=True))
    assert len(set(map(label, methods))) == len(methods) == 11
    for settings in methods:
        protocol = settings.plan(PARTS)
        assert settings.epsilon == epsilon
        if protocol.guarantee.status in ("certified", "as published"):
            orders = [protocol.order] if protocol.order else None
            cost = planning.cost(protocol.event, 1024, 1e-5, *([orders] if orders else []))
            assert 0.99 * epsilon < cost.epsilon <= epsilon * (1 + 1e-9)
    assert "SubMix" not in [label(settings) for settings in private(budget(epsilon), PARTS, halves=False)]


def test_only_chosen_protocols_are_evaluated_beside_the_references() -> None:
    options = EvaluationOptions.checked(protocols=("pmixed", "exponential"))
    compared = [*private(budget(8.0), PARTS, halves=True), EnsembleSettings()]
    assert {each.protocol for each in compared if options.include(each)} == {"pmixed", "exponential", "ensemble"}
    with pytest.raises(InputError, match=r"protocols: .*mixed; choose from .*pmixed"):
        EvaluationOptions.checked(protocols=("mixed",))


def test_a_budget_may_be_a_renyi_epsilon_at_an_order() -> None:
    options = EvaluationOptions.checked(
        protocols=("submix",), fields={"order": "2"}, sweep="renyi_epsilon", values=("0.5", "2")
    )
    for value in options.points:
        *_, (_, settings) = chosen(options, value, PARTS, halves=True)
        assert settings.details(settings.plan(PARTS))["part_budget"] == pytest.approx(float(value or 0), rel=1e-9)
    with pytest.raises(InputError, match=r"renyi-epsilon: .*--set order=2"):
        EvaluationOptions.checked(renyi_epsilon=2.0).budget(None)


@pytest.mark.parametrize(("epsilon", "published", "halves"), [(8.0, 3, 4.0), (2.0, None, None)])
def test_an_order_is_the_papers_where_the_budget_allows_it(
    epsilon: float, published: int | None, halves: float | None
) -> None:
    by_label = {label(settings): settings for settings in private(budget(epsilon), PARTS, halves=True)}
    pmixed, submix = by_label["PMixed, as published"], by_label["SubMix"]
    orders = [settings.plan(PARTS).order or 0.0 for settings in (pmixed, submix)]
    if published is None:
        # At the papers' orders an epsilon of 2 leaves nothing to spend.
        assert orders[0] > 3
        assert orders[1] > 4
    else:
        assert orders == [published, halves]


def test_a_sweep_of_the_budget_has_a_budget_for_each_value() -> None:
    options = EvaluationOptions.checked(sweep="tokens", values=("64", "256", "64"), fields={"delta": "1e-6"})
    assert [options.budget(value).tokens for value in options.points] == [64, 256]
    assert (options.budget("64").delta, options.given("64")) == (1e-6, {})
    with pytest.raises(InputError, match="tokens: "):
        EvaluationOptions.checked(sweep="tokens", values=("many",)).budget("many")
    with pytest.raises(InputError, match="sweep: give a field and its values"):
        EvaluationOptions.checked(sweep="q")


def test_dp_sgd_has_its_own_guarantee(ensemble: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="was not trained by DP-SGD"):
        private_training(Manifest.load(ensemble))
    event = DpSgdEvent("user", noise_multiplier=1.1, sampling_rate=0.1, steps=50)
    training = PrivateTraining(epsilon=event.epsilon(1e-6), delta=1e-6, clip=1.0, blocks=1, event=event)
    settings = dp_sgd(budget(0.1), training)
    protocol = settings.plan(1)
    assert protocol.event == event
    assert (protocol.guarantee.status, protocol.guarantee.adjacency) == ("certified", "user")
    assert settings.delta == 1e-6
    # It fits any budget of the table, because its tokens cost nothing.
    written = write_rows(tmp_path, positions=40, models=1)
    planned = [(settings, protocol)]
    (outcome,) = run_trials(planned, RowReader.open(written.files), np.arange(40), written.tokens)
    assert outcome.answered == 40
