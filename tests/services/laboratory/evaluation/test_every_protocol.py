"""Claim: every protocol can be evaluated and has its rows in a table."""

import math
from pathlib import Path

import numpy as np
import pytest

from privmix.laboratory.evaluation.comparisons import COMPARISONS, compared, distinct_label
from privmix.laboratory.evaluation.figures import PALETTES, style
from privmix.laboratory.evaluation.methods import private
from privmix.laboratory.evaluation.rows import RowReader
from privmix.laboratory.evaluation.trial import run_trials
from privmix.privacy.protocols import PROTOCOLS
from privmix.training.options import TokenBudget
from tests.services.laboratory.evaluation.hidden_states import write_rows

PARTS, POSITIONS = 4, 24
BUDGET = TokenBudget(epsilon=8, delta=1e-5, tokens=POSITIONS)


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_answers_every_position_of_a_run(name: str, tmp_path: Path) -> None:
    chosen = PROTOCOLS[name]
    protocol = chosen.model_validate({"tokens": POSITIONS}).plan(1 if chosen.one_model else PARTS)
    written = write_rows(tmp_path, POSITIONS, protocol.models)
    planned = [(chosen.model_validate({"tokens": POSITIONS}), protocol)]
    (outcome,) = run_trials(planned, RowReader.open(written.files), np.arange(POSITIONS), written.tokens)
    assert outcome.positions == POSITIONS
    assert outcome.possible == 0 or math.isfinite(outcome.loss)
    if not protocol.event.measured:
        assert outcome.answered == POSITIONS
        assert outcome.asked == pytest.approx(protocol.expected_rows, abs=1e-9) or protocol.draws((1,)).keys() > {(1,)}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_has_rows_in_a_table_and_a_line_style(name: str) -> None:
    rows = [settings for settings in private(BUDGET, PARTS, halves=True) if settings.protocol == name]
    assert rows == list(compared(name, PARTS, BUDGET.limits()))
    assert all((settings.epsilon, settings.delta, settings.tokens) == (8.0, 1e-5, POSITIONS) for settings in rows)
    assert len(set(map(distinct_label, rows))) == len(rows)
    assert len({style(PALETTES["light"], distinct_label(settings)) for settings in rows}) == len(rows)


def test_every_comparison_is_of_a_registered_protocol_and_has_its_own_label() -> None:
    assert set(COMPARISONS) <= set(PROTOCOLS)
    labels = [comparison.label(PROTOCOLS[name].model_validate({})) for name, comparison in COMPARISONS.items()]
    assert len(set(labels)) == len(labels)
