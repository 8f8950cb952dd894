"""Claim: one user changes one part's votes and nothing else, and a student costs what its labels cost."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from privmix.budget.reader import read
from privmix.foundation.errors import InputError, WorkError
from privmix.foundation.progress import Display
from privmix.laboratory.heads import clinic, compare, head, methods, pate
from privmix.laboratory.heads.models import Parametrised
from privmix.laboratory.heads.names import MethodName
from privmix.laboratory.heads.pate import LabellingEvent, PateSettings
from privmix.laboratory.heads.table import Table
from privmix.privacy import accounting
from privmix.privacy.events import from_json
from privmix.privacy.protocols.gnmax import GNMaxEvent
from tests.support.tables import generated

DELTA = 1e-5
SETTINGS = PateSettings(parts=10, queries=30, steps=20)


@pytest.mark.parametrize("rows", [0, 1, 9])
def test_a_user_changes_one_model_and_no_bit_of_the_others(rows: int) -> None:
    """The user leaves the table, or comes back with another number of rows and at another place."""
    table = generated(200, users=40)
    rng = np.random.default_rng(1)
    for user in (0, 17, 39):
        others = table.rows(table.users != user)
        changed = replace(
            others,
            x=np.concatenate([rng.uniform(-1, 1, size=(rows, 3)).astype(np.float32), others.x]),
            y=np.concatenate([rng.integers(0, 2, size=rows).astype(np.float32), others.y]),
            users=np.concatenate([np.full(rows, user), others.users]),
        )
        before, after = _models(table), _models(changed)
        assert (before != after).any(dim=1).sum() == 1


def test_a_record_changes_one_model_and_no_bit_of_the_others() -> None:
    table = generated(200)
    before, after = _models(table), _models(table.rows(np.arange(1, 200)))
    assert (before != after).any(dim=1).sum() == 1


def test_parts_hold_all_rows() -> None:
    for table, held in ((generated(5000), 5000), (generated(1000, users=400), 1000)):
        settings = PateSettings(parts=20, rows_per_user=20)
        x, _, mask = pate._parts(table, settings, seed=3)
        assert mask.sum() == held
        assert x.shape[:2] == mask.shape


def test_a_user_moves_each_count_by_at_most_one() -> None:
    table = generated(200, users=40)
    torch.manual_seed(0)
    queries = 2 * torch.rand(500, 3) - 1
    make, moved = methods.build(table), 0
    before = pate.votes(make, table, SETTINGS, 0, queries)
    for user in range(40):
        flipped = np.where(table.users == user, 1 - table.y, table.y).astype(np.float32)
        after = pate.votes(make, replace(table, y=flipped), SETTINGS, 0, queries)
        assert np.abs(after - before).max() <= 1
        moved += int(np.abs(after - before).sum())
    assert moved > 0


def test_the_cost_is_that_of_the_composed_votes_and_within_epsilon() -> None:
    event = pate.event(generated(), 1.0, DELTA, SETTINGS)
    orders = accounting.ORDERS
    np.testing.assert_allclose(event.rdp(orders), 30 * GNMaxEvent(10, event.sigma).rdp(orders))
    assert accounting.epsilon(event.rdp(orders), DELTA).epsilon == pytest.approx(1.0, abs=1e-6)
    assert 0.5 < event.pld().get_epsilon_for_delta(DELTA) <= 1.0
    assert from_json(event.to_json()) == event
    twice = accounting.rdp({event: 1, replace(event, run="another"): 1}, orders)
    np.testing.assert_allclose(twice, 2 * event.rdp(orders))


@pytest.mark.parametrize(
    ("field", "value"), [("parts", 0), ("sigma", 0.0), ("queries", 0), ("queries", 1.5), ("unit", "part")]
)
def test_an_impossible_event_is_refused_by_its_field(field: str, value: Any) -> None:
    event = LabellingEvent(10, 5.0, 30)
    with pytest.raises(ValueError, match=field):
        replace(event, **{field: value})


def test_labels_are_noisy() -> None:
    """With a noise far above the number of parts, students of the same table disagree."""
    table, event = generated(400), LabellingEvent(10, 1e4, 30)
    make = methods.build(table)
    students = [pate.release(make, table, event, SETTINGS, seed=0) for _ in range(3)]
    assert not torch.equal(students[0], students[1])
    assert not torch.equal(students[1], students[2])


def test_a_student_is_charged_once(tmp_path: Path) -> None:
    table, ledger = generated(400), str(tmp_path / "ledger.db")
    made = head.train(table, "gnmax", 1.0, tmp_path / "first", ledger=ledger, budget=1.0)
    assert made.event is not None
    assert dict(read(ledger).charged) == {from_json(made.event): 1}
    with pytest.raises(WorkError, match="budget"):
        head.train(table, "gnmax", 1.0, tmp_path / "second", ledger=ledger, budget=1.0)


@pytest.mark.parametrize("method", ["expm-certified", "dp-sgd", "gnmax"])
def test_no_head_with_a_guarantee_is_trained_on_features_scaled_by_private_rows(
    method: MethodName, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="scaled by the private rows"):
        head.train(replace(generated(), scaling="private"), method, 1.0, tmp_path / "head")
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    ("table", "left_out"),
    [
        (generated(300, users=60), {"dp-sgd"}),
        (clinic.clinic(stays=200), {"gnmax"}),
        (replace(generated(), scaling="private"), {"gnmax", "expm-certified"}),
    ],
    ids=["users", "series", "private scaling"],
)
def test_a_comparison_names_the_methods_that_it_leaves_out(
    table: Table, left_out: set[MethodName], tmp_path: Path
) -> None:
    plan = compare.HeadPlan((1.0,), ("non-private", *sorted(left_out)), seeds=1, search=False)
    record = compare.compare(table, plan, tmp_path, compare.in_process(Display()), Display()).record()
    assert record["left_out"].keys() == left_out
    assert record["auc"].keys() == {"non-private"}


def test_no_guarantee_covers_scales_that_come_from_the_rows(tmp_path: Path) -> None:
    table, plan = replace(generated(), scaling="private"), compare.HeadPlan((1.0,), ("dp-sgd",), seeds=1, search=False)
    record = compare.compare(table, plan, tmp_path, compare.in_process(Display()), Display()).record()
    assert "does not cover" in record["guarantee"]["dp-sgd"]


def _models(table: Table) -> torch.Tensor:
    torch.manual_seed(0)
    model = Parametrised(methods.build(table)())
    return pate._train_parts(model, *pate._parts(table, SETTINGS, 0), SETTINGS)
