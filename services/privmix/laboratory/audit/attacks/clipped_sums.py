"""Adds one user to a step of DP-SGD and compares the sum of clipped gradients, in whole numbers, with the claim.

The claim: the sum moves by what the user adds alone, and by at most the clip. The user's text is longer than the
others', who have one text in common. So if passes were shared, and had the width of their longest text, the user would
change the rounding of all others in the same direction, which adds up.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from privmix.privacy.sampling.clipping import GRAINS
from privmix.training import public_model
from privmix.training.adapter import with_lora
from privmix.training.options import DP_SGD_TRAINING, DpSgdOptions
from privmix.training.packing import Tokens
from privmix.training.per_unit import UnitGradients

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
