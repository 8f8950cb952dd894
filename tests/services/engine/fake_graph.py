"""Stands in for a CUDA graph on a CPU: records the operators of a function, and repeats them on the same tensors.

It refuses what a capture cannot do, such as values or shapes that follow from data, and what a capture would freeze,
such as the host's numbers in a new tensor.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm.platforms import current_platform

from privmix.engine import step_graph
from privmix.engine.reader_rows import ReaderRows
from privmix.engine.step_graph import StepGraphs, StepShape
from privmix.foundation import compiled

REFUSED = frozenset(
    {
        "_local_scalar_dense",
        "_unique2",
        "equal",
        "is_nonzero",
        "item",
        "lift_fresh",
        "lift_fresh_copy",
        "masked_select",
        "nonzero",
        "unique_consecutive",
        "unique_dim",
    }
)
POINTERS = frozenset({"get_scheduler_metadata"})
"""Operators whose output points into itself, so a copy of it would point to the output of the capture."""
INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})


class FakeGraph(TorchDispatchMode):
    """Implements `step_graph.Graph` on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._tape: list[tuple[Any, Any, Any, Any]] = []

    def capture(self, function: Callable[[], Tensor]) -> Tensor:
        with self:
            return function()

    @torch.inference_mode()
    def replay(self) -> None:
        replaced: dict[int, Any] = {}
        for operator, arguments, options, output in self._tape:
            current = [replaced.get(id(argument), argument) for argument in arguments]
            result = operator(*current, **{name: replaced.get(id(value), value) for name, value in options.items()})
            if _name(operator) in POINTERS:
                replaced[id(output)] = result
                continue
            for old, new in zip(_tensors(output), _tensors(result), strict=True):
                if old.data_ptr() != new.data_ptr():
                    old.copy_(new)

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        name = _name(operator)
        masked = name in INDEXING and any(index is not None and index.dtype == torch.bool for index in args[1])
        if name in REFUSED or masked:
            raise RuntimeError(f"{operator._schema.name} cannot be captured")
        output = operator(*args, **options)
        views = _memory(output) and _memory(output) <= _memory([*args, *options.values()])
        if operator._schema.is_mutable or not views:  # a view stays one
            self._tape.append((operator, args, options, output))
        return output


def capture_on_a_cpu(patch: pytest.MonkeyPatch, graph: type = FakeGraph) -> None:
    """Lets the engines that are made from now on capture decode steps of up to 4 sequences, with such graphs."""
    patch.setattr(ReaderRows, "new_graph", graph)
    patch.setattr(step_graph, "SIZES", (1, 2, 4))
    # The stand-in records PyTorch's operators: not those that we compile, and not what vLLM hides behind one that reads
    # the forward context.
    patch.setattr(compiled, "operators", lambda _source: None)
    patch.setattr(type(current_platform), "opaque_attention_op", classmethod(lambda _cls: False))


def recorded_steps(patch: pytest.MonkeyPatch) -> list[StepShape]:
    """Returns the list to which each captured step will add its shape."""
    shapes: list[StepShape] = []
    step = StepGraphs.step

    def recorded(graphs: StepGraphs, shape: StepShape, *arguments: Any) -> Tensor:
        shapes.append(shape)
        return step(graphs, shape, *arguments)

    patch.setattr(StepGraphs, "step", recorded)
    return shapes


def _name(operator: Any) -> str:
    name: str = operator._schema.name.partition("::")[2]
    return name


def _memory(values: Any) -> set[int]:
    # Memory and not the schema: with torch 2.13.0, `reshape` under inference_mode may copy, and its schema says view.
    return {tensor.untyped_storage().data_ptr() for tensor in _tensors(values)}


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors(value)
