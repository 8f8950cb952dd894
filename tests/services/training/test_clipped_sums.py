"""Claim: one user moves the sum of clipped gradients by what the user adds alone, and by at most the clip.

The user's text is longer than the others', who have one text in common. So if passes were shared, and had the width of
their longest text, the user would change the rounding of all others in the same direction, which adds up.
"""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from privmix.privacy.sampling.clipping import GRAINS
from privmix.training import per_unit, public_model, row_gradients
from privmix.training.adapter import with_lora
from privmix.training.options import DP_SGD_TRAINING, DpSgdOptions
from privmix.training.packing import Tokens
from privmix.training.per_unit import UnitGradients
from privmix.training.row_gradients import RowGradients, TokenRow
from tests.tiny import write_tiny_model

PLANTED: list[int] = []
USERS, SHORT, LONG = 31, 15, 17


def of_training() -> tuple[str, ...]:
    """Attacks the training by its defaults on the public model, on this machine; returns what breaks the claim.

    Raises:
        PublicModelError: there is no public model.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    model = with_lora(public_model.resolve(), public_model.DEFAULT, DP_SGD_TRAINING, device)
    private = DpSgdOptions()
    return differences(UnitGradients(model, DP_SGD_TRAINING.block, private.matrices), *texts(), private.clip)


def texts() -> tuple[list[Tokens], Tokens]:
    """Returns the texts of all users but one, which are the same, and the longer text of this one."""
    random = np.random.default_rng(0)
    short, long = (random.integers(300, 4000, length).astype(np.int32) for length in (SHORT, LONG))
    return [short] * USERS, long


def differences(gradients: UnitGradients, others: Sequence[Tokens], user: Tokens, clip: float) -> tuple[str, ...]:
    """Returns what breaks the claim for one user beside others, as sentences."""
    without, present = (gradients.clipped_sum(units, clip) for units in ([*others], [*others, user]))
    moved, own = present - without, gradients.clipped_sum([user], clip)
    found = []
    if not torch.equal(moved, own):
        found.append(f"one user moves the gradients of {len(others)} others by {_clips(moved - own):.2g} clips in all")
    if _clips(moved) > 1:
        found.append(f"one user moves the sum of clipped gradients by {_clips(moved):.4f} clips")
    return tuple(found)


def _clips(grains: torch.Tensor) -> float:
    return math.sqrt(sum(int(grain) ** 2 for grain in grains)) / GRAINS


class SharedPasses(RowGradients):
    """The planted fault, as it once was: all rows are in one pass, as wide as the longest, with fused attention."""

    def of(self, rows: Sequence[TokenRow]) -> Iterator[tuple[int, Tensor]]:
        PLANTED.append(len(rows))
        yield from enumerate(self._pass(rows, max(len(row.inputs) for row in rows), len(rows), self.weights))


def attacked(folder: Path) -> tuple[str, ...]:
    torch.manual_seed(0)
    options = DP_SGD_TRAINING.model_copy(update={"precision": "bfloat16"})
    model = with_lora(write_tiny_model(folder / "tiny"), "tiny", options, torch.device("cpu"))
    return differences(UnitGradients(model, options.block), *texts(), clip=1.0)


def test_the_training_keeps_the_claim(tmp_path: Path) -> None:
    assert attacked(tmp_path) == ()


def test_users_who_share_passes_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(per_unit, "RowGradients", SharedPasses)
    monkeypatch.setattr(row_gradients, "_EAGER", 0)
    PLANTED.clear()
    others, moved = attacked(tmp_path)
    assert PLANTED == [USERS, USERS + 1, 1]
    assert "moves the gradients of 31 others" in others
    assert "moves the sum of clipped gradients by 1.0" in moved


@pytest.mark.slow
def test_the_training_keeps_the_claim_on_the_public_model() -> None:
    assert of_training() == ()
