"""Claim: the attack on DP-SGD's sums finds users who share passes, and finds nothing in the training itself."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from privmix.laboratory.audit.attacks import clipped_sums, pipeline
from privmix.laboratory.audit.report.finding import broken
from privmix.training import per_unit, row_gradients
from privmix.training.adapter import with_lora
from privmix.training.options import DP_SGD_TRAINING
from privmix.training.per_unit import UnitGradients
from privmix.training.row_gradients import RowGradients, TokenRow
from tests.tiny import write_tiny_model

PLANTED: list[int] = []


class SharedPasses(RowGradients):
    """The planted fault, as it once was: all rows are in one pass, as wide as the longest, with fused attention."""

    def of(self, rows: Sequence[TokenRow]) -> Iterator[tuple[int, Tensor]]:
        PLANTED.append(len(rows))
        yield from enumerate(self._pass(rows, max(len(row.inputs) for row in rows), len(rows), self.weights))


def attacked(folder: Path) -> tuple[str, ...]:
    torch.manual_seed(0)
    options = DP_SGD_TRAINING.model_copy(update={"precision": "bfloat16"})
    model = with_lora(write_tiny_model(folder / "tiny"), "tiny", options, torch.device("cpu"))
    return clipped_sums.differences(UnitGradients(model, options.block), *clipped_sums.texts(), clip=1.0)


def test_the_training_keeps_the_claim(tmp_path: Path) -> None:
    assert attacked(tmp_path) == ()


def test_users_who_share_passes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_unit, "RowGradients", SharedPasses)
    monkeypatch.setattr(row_gradients, "_EAGER", 0)
    PLANTED.clear()
    others, moved = attacked(tmp_path)
    assert PLANTED == [clipped_sums.USERS, clipped_sums.USERS + 1, 1]
    assert "moves the gradients of 31 others" in others
    assert "moves the sum of clipped gradients by 1.0" in moved
    assert broken([pipeline.finding("DP-SGD", (others, moved))])


@pytest.mark.slow
def test_the_training_keeps_the_claim_on_the_public_model() -> None:
    assert clipped_sums.of_training() == ()
