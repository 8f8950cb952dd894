"""Computes how long a decode step takes at least on a device that only moves its bytes and does its multiplications.

Each matrix product costs the larger of the time to read its weights and write its results, and that of its floating
point operations. Weights, keys, values and states are bfloat16; logits are float32. Public and reader rows of a step
run the layers after the fork together, so that these read their weights once.
"""

from dataclasses import dataclass

from tests.benchmarks.shapes import RANK, Shape

READS_OF_LOGITS = 3
"""How often a reduction reads the readers' logits."""
BYTES = 2
LOGIT_BYTES = 4


@dataclass(frozen=True)
class Rates:
    """Holds what a device does in a second: bytes that a copy reads and writes, and operations of a product."""

    bytes: float
    operations: float


@dataclass(frozen=True)
class DecodeStep:
    """Describes a decode step: sequences of a context, with a number of readers drawn from `parts` for each."""

    sequences: int
    readers: int
    context: int
    parts: int

    @property
    def rows(self) -> int:
        """Returns the number of reader rows."""
        return self.sequences * self.readers


def floors_ms(shape: Shape, step: DecodeStep, rates: Rates) -> dict[str, float]:
    """Returns the least milliseconds of a step by stage, of the step without a reduction, and of all."""
    floors = _Floors(shape, step, rates)
    stages = {
        "layers": floors.layers(),
        "attention": floors.attention(),
        "adapters": floors.adapters(),
        "head": floors.head(),
        "reduction": floors.reduction(),
    }
    rows = sum(stages.values()) - stages["reduction"]
    return {name: 1000 * seconds for name, seconds in {**stages, "rows": rows, "all": sum(stages.values())}.items()}


@dataclass(frozen=True)
class _Floors:
    shape: Shape
    step: DecodeStep
    rates: Rates

    def layers(self) -> float:
        """Returns the seconds of the products of all layers, below the fork with public rows alone."""
        shape, step = self.shape, self.step
        below = (shape.layers - shape.readers) * self._layer(step.sequences)
        return below + shape.readers * self._layer(step.sequences + step.rows)

    def _layer(self, rows: int) -> float:
        shape = self.shape
        widths = sum(sum(size) for size in shape.modules.values()) + 2 * shape.keys
        return self._product(shape.weights, rows, rows * widths * BYTES)

    def _product(self, weights: int, rows: int, state_bytes: int) -> float:
        return max((BYTES * weights + state_bytes) / self.rates.bytes, 2 * rows * weights / self.rates.operations)

    def attention(self) -> float:
        """Returns the seconds to read the cache in each layer once, and of the readers' operations beyond."""
        shape, step = self.shape, self.step
        cache = 2 * shape.keys * BYTES * step.context * step.sequences / self.rates.bytes
        operations = 4 * step.rows * shape.heads * shape.head_size * step.context / self.rates.operations
        return shape.layers * cache + shape.readers * operations

    def adapters(self) -> float:
        """Returns the seconds to read each adapter that was drawn once, and the states that it multiplies."""
        shape, step = self.shape, self.step
        missed = (1 - step.readers / step.parts) ** step.sequences
        drawn = step.parts * (1 - missed)
        weights = RANK * sum(sum(size) for size in shape.modules.values())
        states = step.rows * sum(inputs + outputs for inputs, outputs in shape.modules.values())
        return shape.readers * BYTES * (weights * drawn + states) / self.rates.bytes

    def head(self) -> float:
        shape, rows = self.shape, self.step.sequences + self.step.rows
        return self._product(shape.hidden * shape.vocabulary, rows, rows * shape.vocabulary * LOGIT_BYTES)

    def reduction(self) -> float:
        return READS_OF_LOGITS * self.step.rows * self.shape.vocabulary * LOGIT_BYTES / self.rates.bytes
