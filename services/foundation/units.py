"""Names the units whose presence a guarantee can hide, and the default guarantee."""

from typing import Literal, get_args

Unit = Literal["record", "user"]
"""One document or row (``record``), or everything of one ``user``."""

EPSILON, DELTA, TOKENS = 8.0, 1e-5, 1024
"""The default budget: (epsilon, delta) for this number of tokens."""


def check_unit(unit: object) -> None:
    """Raises ValueError unless `unit` is a `Unit`."""
    if unit not in get_args(Unit):
        raise ValueError(f"unit must be {' or '.join(get_args(Unit))}, got {unit!r}")
