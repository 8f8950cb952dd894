"""Names the units whose presence a guarantee can hide, the default guarantee, and the least clip."""

from typing import Literal, get_args

Unit = Literal["record", "user"]
"""One document or row (``record``), or everything of one ``user``."""

EPSILON, DELTA, TOKENS = 8.0, 1e-5, 1024
"""The default budget: (epsilon, delta) for this number of tokens."""
MIN_CLIP = 1e-30
"""The least norm to which DP-SGD clips: zero times an infinite scale is not a number."""


def check_unit(unit: object) -> None:
    """Raises ValueError unless `unit` is a `Unit`."""
    if unit not in get_args(Unit):
        raise ValueError(f"unit must be {' or '.join(get_args(Unit))}, got {unit!r}")
