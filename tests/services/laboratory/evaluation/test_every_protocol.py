"""Claim: every protocol can be evaluated, has its rows in a table, and takes values of its fields."""

import math
from pathlib import Path

import numpy as np
import pytest

from privmix.foundation.errors import InputError
from privmix.laboratory.evaluation.methods import check_taken, compared, private, with_fields
from privmix.laboratory.evaluation.rows import RowReader
from privmix.laboratory.evaluation.trial import run_trials
from privmix.privacy.protocols import PROTOCOLS
from privmix.privacy.protocols.pmixed import PMixedSettings
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
        assert outcome.asked == pytest.approx(protocol.rows, abs=1e-9) or protocol.draws((1,)).keys() > {(1,)}


@pytest.mark.parametrize("name", [name for name in PROTOCOLS if list(compared(name, PARTS, BUDGET))])
def test_any_field_of_a_protocol_is_swept(name: str) -> None:
    rows = list(compared(name, PARTS, BUDGET))
    for field in set(type(rows[0]).model_fields) - {"protocol", "epsilon", "delta", "tokens"}:
        value = str(next((own for row in rows if (own := getattr(row, field)) is not None), "none"))
        (named, first), *_ = with_fields(rows, {field: value}, field)
        assert getattr(first, field) == (None if value == "none" else type(getattr(first, field))(value))
        assert named


def test_a_field_takes_its_values_and_others_stay() -> None:
    rows = list(private(BUDGET, PARTS, halves=True))
    swept = list(with_fields(rows, {"q": "0.25", "radius": "0.1"}, "q"))
    assert {settings.protocol for _, settings in swept} == {each.protocol for each in rows if hasattr(each, "q")}
    assert all(settings.q == 0.25 for _, settings in swept if isinstance(settings, PMixedSettings))
    fixed = [settings for _, settings in with_fields(rows, {"q": "0.25"})]
    assert [settings.protocol for settings in fixed] == [settings.protocol for settings in rows]
    with pytest.raises(InputError, match=r"colour: no protocol here has such a field; they have .*radius"):
        check_taken(rows, "colour", "red")
    with pytest.raises(InputError, match="q: pmixed does not take '7': "):
        check_taken(rows, "q", "7")
