"""Runs a whole decode step as one captured graph: public rows, reader rows, and their logits.

Outside a graph the layers of a small model are launched one kernel at a time, and a GPU waits for the host between
them. A captured step is one launch. It holds, for S sequences with m readers each,

- the layers below the fork on S public tokens,
- the layers from the fork on with 1 + m rows a sequence, the public row first. One pass of both reads the weights once.
  A sequence's rows are one attention query of 1 + m tokens without a causal mask: the layer stores the public row's key
  before its attention runs, and all rows stand at that position;
- the head, whose logits are [S, 1 + m, V] in the order in which the engine was asked.

A graph is captured for each shape (S, m), and a step of fewer sequences is padded. A graph reads what changes between
steps from one buffer (`StepInputs`), from vLLM's block table, from its cache, and from the adapter slots; all of them
keep their addresses. Lengths are on the device, and what the host must fix is an upper bound (the context length).

Graphs have a memory pool of their own and share it, the largest first: a step's logits are overwritten by the next
step. vLLM's own graphs are not used: they know one row a request, and their wrapper shares one pool with weak
references to outputs, so that a second pass in it could overwrite the first one's hidden states.
"""

import gc
from collections.abc import Callable
from itertools import islice, pairwise
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from vllm.forward_context import set_forward_context
from vllm.v1.attention.backend import CommonAttentionMetadata

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""The numbers of sequences for which steps are captured."""
MAX_ROWS = 4160
"""The maximum number of rows in a captured step: 64 sequences of 64 readers each. It bounds their memory."""
MAX_ADAPTER_INTEGERS = 5 * MAX_ROWS
"""The maximum of `ReaderAdapters.integers_for`."""
WARM_UPS = 2
"""The number of runs before a capture, in which kernels are compiled and libraries allocate their workspaces."""


class StepShape(NamedTuple):
    """Names a captured step: the number of sequences, padding included, and of readers for each of them."""

    sequences: int
    readers: int

    @property
    def rows(self) -> int:
        return self.sequences * (1 + self.readers)


def shapes(readers: int) -> list[StepShape]:
    """Returns the shapes with this number of readers, the largest first."""
    return [shape for size in reversed(SIZES) if (shape := StepShape(size, readers)).rows <= MAX_ROWS]


class ReaderAdapters(Protocol):
    """Applies adapters to the rows of a step. The LoRA implementations of both devices have these methods."""

    def integers_for(self, shape: StepShape) -> int:
        """Returns how many integers `write_adapters` writes."""

    def write_adapters(self, shape: StepShape, slots: np.ndarray, out: np.ndarray) -> None:
        """Writes what the layers need to know of the adapter slots of each reader, int [S, m], into `out`, int32."""

    def use_adapters(self, shape: StepShape, integers: Tensor) -> None:
        """Lets the coming layers of a step read what `write_adapters` wrote, from its copy on the device."""


class StepInputs:
    """Holds what a step tells its graph, in one buffer on the host and one on the device.

    The buffer has the number of live sequences and, for each sequence, its token, its position, and its row of vLLM's
    block table; then what `ReaderAdapters` writes.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        pinned = device.type != "cpu"
        self._host = torch.zeros(size, dtype=torch.int32, pin_memory=pinned)
        self._device = torch.zeros(size, dtype=torch.int32, device=device)
        self._integers = self._host.numpy()

    @staticmethod
    def size(shape: StepShape, adapters: int) -> int:
        return 1 + 3 * shape.sequences + adapters

    def write(self, shape: StepShape, tokens: np.ndarray, positions: np.ndarray, table_rows: np.ndarray) -> np.ndarray:
        """Writes a step of at most `shape.sequences` sequences. Returns the place for the adapters' integers."""
        count, size = len(tokens), shape.sequences
        self._integers[0] = count
        sequences = self._integers[1 : 1 + 3 * size].reshape(3, size)
        sequences[:, :count] = tokens, positions, table_rows
        sequences[:, count:] = 0
        return self._integers[1 + 3 * size :]

    def send(self, integers: int) -> None:
        """Copies the first integers to the device."""
        self._device[:integers].copy_(self._host[:integers], non_blocking=True)

    def views(self, shape: StepShape, adapters: int) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Returns the device's count [1], tokens, positions and rows of the block table [S], and adapters' integers."""
        size = shape.sequences
        starts = (0, 1, 1 + size, 1 + 2 * size, 1 + 3 * size, self.size(shape, adapters))
        count, tokens, positions, rows, integers = (self._device[first:last] for first, last in pairwise(starts))
        return count, tokens, positions, rows, integers


class Graph(Protocol):
    """Records a function of no arguments once, and repeats its work on the same memory."""

    def capture(self, function: Callable[[], Tensor]) -> Tensor: ...

    def replay(self) -> None: ...


class CudaGraph:
    """Implements `Graph` with a CUDA graph.

    Args:
        pool: of the graph's memory; see `torch.cuda.graph_pool_handle`.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, function: Callable[[], Tensor]) -> Tensor:
        """Returns a reference to the output that does not keep its memory: a graph captured later may use it."""
        from vllm.utils.torch_utils import weak_ref_tensor

        for _ in range(WARM_UPS):
            function()
        torch.cuda.synchronize()
        with torch.cuda.graph(self._graph, pool=self._pool):
            output = function()
        reference: Tensor = weak_ref_tensor(output)
        return reference

    def replay(self) -> None:
        self._graph.replay()


class StepGraphs:
    """Captures and replays the steps of a model runner.

    Args:
        runner: vLLM's model runner with its model, cache and adapters loaded. It has one group of cache layers.
        fork: the first layer that readers run.
        adapters: None for a model without adapters.
        graph: makes an empty graph.
    """

    def __init__(
        self, runner: Any, fork: int, adapters: ReaderAdapters | None, graph: Callable[[], Graph] | None = None
    ) -> None:
        self._runner = runner
        self._fork = fork
        self._adapters = adapters
        if graph is None:
            pool = torch.cuda.graph_pool_handle()
            graph = lambda: CudaGraph(pool)  # noqa: E731
        self._new_graph = graph
        self._inputs = StepInputs(1 + 3 * max(SIZES) + MAX_ADAPTER_INTEGERS, runner.device)
        self._graphs: dict[StepShape, tuple[Graph, Tensor]] = {}

    def capture(self, readers: int) -> None:
        """Captures the steps with this number of readers for each sequence."""
        gc.collect()
        gc.freeze()  # each capture collects garbage, and need not search what was there before
        try:
            for shape in shapes(readers):
                graph = self._new_graph()
                self._inputs.write(shape, *np.zeros((3, shape.sequences), dtype=np.int64))[:] = 0
                self._inputs.send(self._integers(shape))
                self._graphs[shape] = graph, graph.capture(lambda shape=shape: self.run(shape))  # type: ignore[misc]
        finally:
            gc.unfreeze()

    def shape_for(self, sequences: int, readers: int) -> StepShape | None:
        """Returns the smallest captured shape that holds these sequences with this many readers; None if none does."""
        fitting = (StepShape(size, readers) for size in SIZES if size >= sequences)
        return next((shape for shape in fitting if shape in self._graphs), None)

    def step(
        self, shape: StepShape, tokens: np.ndarray, positions: np.ndarray, table_rows: np.ndarray, slots: np.ndarray
    ) -> Tensor:
        """Runs a captured step. vLLM's block table on the device must be current.

        Args:
            tokens, positions: int [sequences], the last token of each sequence and its position.
            table_rows: int [sequences], their rows in vLLM's block table.
            slots: int [sequences, m], the adapter slots of their readers.

        Returns:
            The logits, [shape.sequences, 1 + m, V], valid until the next step. Rows of the padding say nothing.
        """
        place = self._inputs.write(shape, tokens, positions, table_rows)
        if self._adapters is not None and shape.readers:
            padded = np.zeros((shape.sequences, shape.readers), dtype=np.int64)
            padded[: len(slots)] = slots
            self._adapters.write_adapters(shape, padded, place[: self._adapters.integers_for(shape)])
        self._inputs.send(self._integers(shape))
        graph, logits = self._graphs[shape]
        graph.replay()
        return logits.view(shape.sequences, 1 + shape.readers, -1)

    def run(self, shape: StepShape, *, profiling: bool = False) -> Tensor:
        """Runs the layers and the head on what the buffers hold: the work that a graph records.

        Args:
            profiling: run without a cache, as vLLM does when it measures its memory.

        Returns:
            [S (1 + m), V], the logits.
        """
        runner, (sequences, readers) = self._runner, shape
        count, tokens, positions, table_rows, integers = self._inputs.views(shape, self._adapter_integers(shape))
        positions = positions.long()
        row_positions = positions.repeat_interleave(1 + readers)
        public: dict[str, Any] = {}
        slots: dict[str, Tensor] = {}
        all_rows: dict[str, Any] = {}
        row_slots: dict[str, Tensor] = {}
        if not profiling:
            table = runner.input_batch.block_table.block_tables[0]
            blocks = table.block_table.gpu.index_select(0, table_rows)
            new = _slots(blocks, positions, count, table.block_size)
            row_new = new.new_full((sequences, 1 + readers), -1)  # nothing of a reader is stored
            row_new[:, 0] = new
            lengths = (positions + 1).int()
            public, slots = self._attention(new, lengths, blocks, positions, rows=1)
            all_rows, row_slots = self._attention(row_new.view(-1), lengths, blocks, row_positions, rows=1 + readers)
        if self._adapters is not None:
            self._adapters.use_adapters(shape, integers)
        decoder = runner.get_model().model
        states, residual = decoder.embed_input_ids(tokens.long()), None
        with self._context(public, slots, sequences):
            for layer in islice(decoder.layers, self._fork):
                states, residual = layer(positions, states, residual)
        fork = states if residual is None else states + residual
        states, residual = fork.repeat_interleave(1 + readers, dim=0), None
        with self._context(all_rows, row_slots, shape.rows):
            for layer in islice(decoder.layers, self._fork, None):
                states, residual = layer(row_positions, states, residual)
        logits: Tensor = runner.get_model().compute_logits(decoder.norm(states, residual)[0])
        return logits

    def _integers(self, shape: StepShape) -> int:
        return StepInputs.size(shape, self._adapter_integers(shape))

    def _adapter_integers(self, shape: StepShape) -> int:
        return self._adapters.integers_for(shape) if self._adapters is not None and shape.readers else 0

    def _attention(
        self, slots: Tensor, lengths: Tensor, blocks: Tensor, positions: Tensor, rows: int
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Returns the attention metadata and the slots of each layer, for one query of `rows` tokens a sequence."""
        runner, sequences = self._runner, len(lengths)
        starts = torch.arange(sequences + 1, dtype=torch.int32) * rows
        common = CommonAttentionMetadata(
            query_start_loc=torch.arange(sequences + 1, dtype=torch.int32, device=lengths.device) * rows,
            query_start_loc_cpu=starts,
            seq_lens=lengths,
            seq_lens_cpu_upper_bound=None,
            num_reqs=sequences,
            num_actual_tokens=sequences * rows,
            max_query_len=rows,
            max_seq_len=runner.max_model_len,
            block_table_tensor=blocks,
            slot_mapping=slots,
            causal=rows == 1,
            is_prefilling=torch.zeros(sequences, dtype=torch.bool),
            positions=positions,
        )
        (groups,) = runner.attn_groups
        metadata: dict[str, Any] = {}
        for group in groups:
            metadata |= dict.fromkeys(group.layer_names, group.build_metadata(common))
        return metadata, dict.fromkeys(metadata, slots)

    def _context(self, metadata: dict[str, Any], slots: dict[str, Tensor], tokens: int) -> Any:
        return set_forward_context(
            metadata or None, self._runner.vllm_config, num_tokens=tokens, slot_mapping=slots or None
        )


def _slots(blocks: Tensor, positions: Tensor, count: Tensor, block_size: int) -> Tensor:
    """Returns where the cache stores the key and value of each position, int64 [S]; -1 for the padding."""
    block = blocks.gather(1, (positions // block_size)[:, None])[:, 0].long()
    live = torch.arange(len(positions), device=positions.device) < count
    return torch.where(live, block * block_size + positions % block_size, -1)
