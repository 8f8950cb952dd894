"""Evaluates a function of single rows in batches of a fixed shape, so that a row's result depends on that row alone.

    evaluate = RowFunction(gradients, x, y)
    evaluate(x, y)    # [n, ...]

A guarantee for one row, or one user, assumes that the other rows' results are the same numbers without it. In a batch
of all rows they are not: kernels round by shapes, and the number of rows is private. Here every call has `ROWS` rows,
the last ones zeros if rows are missing. No operation reads another row, and kernels order their sums by shapes, so the
bits of a result follow from the row and its place. That its place does not matter is tried beforehand: random rows,
often permuted, and half of them exchanged, must keep their results to the last bit (compare
`privmix.training.row_gradients`). Where they do not, each row has a call of its own.
"""

from collections.abc import Callable
from copy import copy

import torch
from torch import Tensor

ROWS = 512
"""The number of rows in a call."""
_TRIES = 32
"""A row's result may have few numbers, on which two orders of a sum agree by chance: each place has many tries."""


class RowFunction:
    """Evaluates a function that maps rows x [R, ...] and y [R] to results [R, ...], each from its own row.

    Args:
        function: has no randomness. Its operations have the same shapes in every call.
        x: a tensor with the shape and type of the rows, whose values are not read.
        y: likewise of their targets.

    Attributes:
        rows: the number of rows in a call.
    """

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> None:
        self._function = function
        self.rows = ROWS if _places_are_equal(function, x, y) else 1

    def by(self, function: Callable[[Tensor, Tensor], Tensor]) -> "RowFunction":
        """Returns the evaluation of another function with the same operations, whose places need no trial."""
        other = copy(self)
        other._function = function
        return other

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns the results of rows x [n, ...] and y [n], [n, ...]."""
        missing = -len(x) % self.rows if len(x) else self.rows
        padded = (torch.cat([values, values.new_zeros(missing, *values.shape[1:])]) for values in (x, y))
        batches = zip(*(torch.split(values, self.rows) for values in padded), strict=True)
        return torch.cat([self._function(*batch) for batch in batches])[: len(x)]


def _places_are_equal(function: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor) -> bool:
    """Returns whether rows keep their bits in every place that is tried, beside any rows that are tried."""
    generator = torch.Generator().manual_seed(0)

    def drawn(like: Tensor) -> Tensor:
        return (2 * torch.rand(ROWS, *like.shape[1:], generator=generator) - 1).to(like.dtype)

    rows, targets = drawn(x), drawn(y).abs()
    results = function(rows, targets)
    for _ in range(_TRIES):
        order = torch.randperm(ROWS, generator=generator)
        kept = (torch.rand(ROWS, generator=generator) < 0.5).view(-1)
        moved, wanted = drawn(x), drawn(y).abs()
        moved[kept], wanted[kept] = rows[order][kept], targets[order][kept]
        if not torch.equal(function(moved, wanted)[kept], results[order][kept]):
            return False
    return True
