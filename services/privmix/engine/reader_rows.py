"""Adds reader rows to vLLM: query rows that read a request's KV cache through an adapter and write nothing.

vLLM's scheduler knows one request for each sequence, the public one. Below the first layer that its adapter changes,
the fork, a reader's hidden state is the public one. From there on a reader row

- starts from the hidden state at the fork and has the position of the last token of its owner, a public request;
- is for the attention a query at the end of its owner's sequence;
- has slot -1, like padding, so its keys and values are not stored (nothing reads them: a reader attends to the public
  model's keys and values, its own position included);
- has its adapter in the LoRA mapping, where its owner's tokens have none.

On a GPU a step in which each sequence computes one token is replayed as one graph (`step_graph`), which runs its public
and reader rows together. Every other pass runs eagerly: prompts, which the engine ingests up to their last token, and
all steps of what `captures_steps` names. An eager pass with readers appends them to the public tokens at the fork on a
CPU (`_run_together`): a pass of few rows takes the time to read the weights, so one pass is faster than two. On a GPU
it hands over the hidden states at the fork (`EagleModelMixin`, vLLM's own interface for drafts), and a second pass runs
the layers after the fork for the readers. All readers of a sequence stand at one position, so they are one query of
several tokens without a causal mask, which reads the cache once.

No pass samples. The engine appends the tokens that the coordinator samples (`begin_step`), so a request is an ordinary
one to vLLM: its scheduler computes what is new, and keeps the cache of a request that has nothing new.

A text (`part_text`) in place of an adapter is a request that vLLM ingests once and that nobody continues, so it keeps
its cache blocks. Its rows fork before the first layer. A row has the text's blocks in its block table, and after them
its owner's. vLLM has no negative positions, so the positions of all sequences are shifted by the length of the texts:
rotary attention depends only on differences of positions.

Reviewed against vLLM 0.32.0 (`vllm/v1/worker/gpu_model_runner.py`, `execute_model` and the methods overridden here):

- The readers' layers run eagerly, in a forward context and with attention metadata of their own, on the stream of the
  public pass. They only read the persistent buffers of the public batch.
- `max_num_seqs` sizes the buffers of attention backends: it leaves room for the queries of the readers' pass.
- `is_padding` in the forward context is the public batch's; the readers' context has none, so mixture-of-experts models
  route all reader rows.
- `reshape_and_cache_flash` on CUDA and `cpu_attn_reshape_and_cache` on the CPU skip the `-1` slots.
- `set_active_adapters` gets no LoRA requests, and `specialize_active_lora` is refused: it would let the number of
  launches follow the adapters of the rows. The kernels of `lora_tiles` launch for the number of rows; vLLM's own, which
  run the adapters of a mixture of experts, launch for all slots.
- Without its sampler, a pass ends before the device has read the host's buffers. `_mark_copied` notes when the copies
  of a pass are on their way, and the next pass waits for them before it writes.
- `load_model` refuses model families whose loop over layers nobody has compared with the one here, microbatches,
  pipeline, data and context parallelism, speculative decoding, multimodal models, M-RoPE positions, and latent
  attention (MLA), where a reader's query would meet the latent of its own hidden state.
- With tensor parallelism (`tensor_parallel`), every rank runs the same passes with its own heads. The hidden states at
  the fork are whole on every rank, and so are the logits, which vLLM gathers on all ranks; rank 0 alone keeps rows.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.lora.layers import LoRAMapping
from vllm.lora.request import LoRARequest
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import ModelRunnerOutput

from privmix.engine import VLLM_FAMILIES
from privmix.engine.adapter_slots import AdapterSlots
from privmix.engine.step_graph import Graph, StepGraphs, StepShape, shapes

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as ModelRunner
else:
    ModelRunner = object

FORK = "reader_fork"
"""The key in vLLM's `additional_config` of the first layer that readers run."""
READERS = "readers"
"""The key in vLLM's `additional_config` of the number of readers that a sequence has in captured steps."""
PART_KIND = "part_kind"
"""The key in vLLM's `additional_config` of `EngineSettings.part_kind`."""

_NO_ROWS = np.empty(0, np.int64)
logger = logging.getLogger(__name__)


class RequestedRows(NamedTuple):
    """Names the rows to compute at the last token of one vLLM request.

    Attributes:
        own_row: the index of the request's own row in the answer; None if it is not requested.
        adapters: the LoRA ids of the readers.
        rows: the indices of the readers' rows in the answer.
    """

    own_row: int | None
    adapters: Sequence[int]
    rows: Sequence[int]


@dataclass(slots=True)
class ReaderBatch:
    """Lists the rows that one step of vLLM computes.

    Attributes:
        requests, tokens: the numbers of requests and tokens that the scheduler put into the batch.
        owners, adapters, rows: for each reader, the index of its request, its LoRA id, and its row in the answer.
            Readers of a request are next to each other.
        own, own_rows: for each request whose own row is requested, its index and its row in the answer.
    """

    requests: int
    tokens: int
    owners: np.ndarray
    adapters: np.ndarray
    rows: np.ndarray
    own: np.ndarray
    own_rows: np.ndarray

    @property
    def readers(self) -> int:
        return len(self.owners)


class ReaderRows(ModelRunner):  # type: ignore[misc]
    """Adds reader rows to vLLM's model runners. This mixin must be the first base class."""

    _batch: ReaderBatch | None = None
    _requested: Mapping[str, RequestedRows] = MappingProxyType({})
    _answer: torch.Tensor | None = None
    _answer_rows = 0
    _texts: Mapping[str, int] = MappingProxyType({})
    _text_tokens = 0
    _text_blocks: Mapping[int, Sequence[torch.Tensor]] = MappingProxyType({})
    _shared_queries: bool | None = None
    _token_adapters = _NO_ROWS
    _tokens_computed = 0
    execute_model_state: Any
    slots: AdapterSlots | None = None
    new_graph: Callable[[], Graph] | None = None
    """Makes a graph for steps. By default only a GPU has graphs."""
    _graphs: StepGraphs | None = None
    _copied: torch.cuda.Event | None = None
    _eager_is_logged = False

    def load_model(self, *arguments: Any, **options: Any) -> None:
        refuse_unsupported_features(self)
        super().load_model(*arguments, **options)
        model = self.get_model()
        refuse_unknown_family(model)
        self._fork: int = self.vllm_config.additional_config[FORK]
        self.readers: int = self.vllm_config.additional_config[READERS]
        model.set_aux_hidden_state_layers((self._fork,))
        self.use_aux_hidden_state_outputs = True

    def load_adapters(self, adapters: Sequence[LoRARequest], zero: int, rank: int, targets: Sequence[str]) -> None:
        """Loads the adapters and the zero adapter.

        Args:
            zero: the LoRA id of the zero adapter.
            rank: the adapters' maximum rank.
            targets: the names of the modules that the adapters change.

        Raises:
            ValueError: the model has no module with one of these names.
        """
        manager = self.lora_manager._adapter_manager
        present = {name.rpartition(".")[-1] for name in manager.modules}
        present |= {name.rpartition(".")[-1] for merged in manager.packed_modules.values() for name in merged}
        if missing := sorted(set(targets) - present):
            raise ValueError(f"the model has no modules named {', '.join(missing)}, which the adapters change")
        self.slots = AdapterSlots(self.lora_manager, adapters, zero)

    @property
    def reader_adapters(self) -> Any:
        """Returns vLLM's implementation of LoRA, which is ours (`ReaderAdapters`); None without adapters."""
        if self.lora_config is None:
            return None
        (wrapper,) = self.lora_manager._adapter_manager.punica_wrapper_mapping.values()
        return wrapper

    @property
    def captures_steps(self) -> bool:
        """Whether decode steps are captured. Warns once where a GPU cannot."""
        if self.new_graph is None and self.device.type == "cpu":
            return False
        layers = self.compilation_config.static_forward_context.values()
        adapters = self.reader_adapters
        reasons = {
            "texts as parts": self.vllm_config.additional_config[PART_KIND] == "text",
            "adapters with caches of their own": (
                adapters is not None and self.vllm_config.additional_config[PART_KIND] == "lora"
            ),
            "a mixture of experts": self.model_config.is_moe,
            "layers with a window": _have_windows(layers),
            "several devices": self.vllm_config.parallel_config.tensor_parallel_size > 1,
            "adapters of this rank": adapters is not None and not hasattr(adapters, "use_adapters"),
            "several kinds of caches": len(getattr(self, "attn_groups", None) or [0]) > 1,
            "an attention backend that needs a causal mask": not self._can_share_queries,
        }
        present = [name for name, is_present in reasons.items() if is_present]
        if present and not self._eager_is_logged:
            logger.warning("steps are not captured, so each token takes several times as long: %s", ", ".join(present))
            self._eager_is_logged = True
        return not present

    def capture_steps(self, readers: Sequence[int]) -> Sequence[int]:
        """Captures decode steps with these numbers of readers, the largest first; returns the numbers captured."""
        if not self.captures_steps:
            return ()
        if self._graphs is None:
            self._graphs = StepGraphs(self, self._fork, self.reader_adapters, self.new_graph)
        captured = [number for number in readers if shapes(number)]
        with torch.inference_mode():
            for number in captured:
                self._graphs.capture(number)
        if self.lora_config is not None:
            self.lora_manager._adapter_manager._last_mapping = None  # the rows of the last capture are set now
        return captured

    def tokens_computed(self) -> int:
        """Returns how many tokens all passes have computed."""
        return self._tokens_computed

    def begin_texts(self, texts: Mapping[str, int]) -> None:
        """Announces the requests that the coming steps ingest as texts: the texts' ids by vLLM request id."""
        self._texts = texts

    def finish_texts(self, tokens: int) -> None:
        """Ends the ingestion of texts of this number of tokens. From now on, readers are texts and not adapters."""
        self._texts, self._text_tokens = {}, tokens

    def begin_step(
        self, requested: Mapping[str, RequestedRows], appended: Mapping[str, Sequence[int]], rows: int | None
    ) -> None:
        """Sets what the coming passes compute, by vLLM request id.

        Args:
            requested: the rows to compute.
            appended: the tokens that the engine has appended to requests in vLLM's scheduler.
            rows: starts an answer of this number of rows; None continues the current answer.
        """
        self._requested = requested
        if rows is not None:
            self._answer, self._answer_rows = None, rows
        for request_id, tokens in appended.items():
            self._append(request_id, tokens)

    def _append(self, request_id: str, tokens: Sequence[int]) -> None:
        """Appends tokens to a request, as vLLM does with the tokens that it samples."""
        batch = self.input_batch
        self.requests[request_id].output_token_ids.extend(tokens)
        index = batch.req_id_to_index.get(request_id)
        if index is None:
            return  # `add_request` copies the tokens when the request returns to the batch
        start = batch.num_tokens_no_spec[index]
        end = start + len(tokens)
        batch.token_ids_cpu[index, start:end] = tokens
        batch.is_token_ids[index, start:end] = True
        batch.num_tokens_no_spec[index] = end

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:
        self.execute_model_state = None
        self.kv_connector_output = None
        return self._ended()

    def take_answer(self) -> torch.Tensor | None:
        """Returns logits, [rows, vocabulary], after all requests have reached their last token.

        Only rank 0 of a tensor-parallel engine has them; the other ranks return None.
        """
        answer, self._answer, self._requested = self._answer, None, {}
        if answer is None and self._keeps_rows:
            raise RuntimeError("no step has computed the requested rows")
        return answer

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput, *arguments: Any, **options: Any) -> Any:
        if self._copied is not None:
            self._copied.synchronize()  # the pass before still reads the buffers that this one writes
        if (shape := self._captured_shape(scheduler_output)) is not None:
            return self._execute_captured(scheduler_output, shape)
        try:
            output = super().execute_model(scheduler_output, *arguments, **options)
            if self._batch is not None and self.execute_model_state is not None:
                self._keep_rows(self._batch)
            return output
        finally:
            self._batch = None

    def _captured_shape(self, scheduler_output: SchedulerOutput) -> StepShape | None:
        """Returns the captured step that computes what the scheduler asks for, if there is one.

        It computes the last token of each request whose rows are requested, and nothing else.
        """
        scheduled = scheduler_output.num_scheduled_tokens
        if self._graphs is None or not scheduled or scheduled.keys() != self._requested.keys():
            return None
        cached = scheduler_output.scheduled_cached_reqs
        lasts = [len(new.prompt_token_ids) - new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs]
        lasts += [
            self.requests[request_id].num_tokens - computed
            for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        ]
        if any(last != 1 for last in lasts):
            return None
        readers = max(len(requested.adapters) for requested in self._requested.values())
        return self._graphs.shape_for(len(scheduled), readers)

    def _execute_captured(self, scheduler_output: SchedulerOutput, shape: StepShape) -> ModelRunnerOutput:
        """Runs a captured step. vLLM's own inputs of a pass are not prepared: the graph has its own."""
        assert self._graphs is not None
        self._update_states(scheduler_output)
        self._tokens_computed += scheduler_output.total_num_scheduled_tokens
        batch = self.input_batch
        requested = [self._requested[request_id] for request_id in batch.req_ids]
        order = np.argsort([-1 if each.own_row is None else each.own_row for each in requested], kind="stable")
        requested = [requested[index] for index in order]
        positions = batch.num_computed_tokens_cpu[order]
        slots = np.zeros((len(order), shape.readers), dtype=np.int64)  # any slot will do where a request has no reader
        if shape.readers and self.slots is not None:
            counts = np.array([len(each.adapters) for each in requested])
            adapters = np.array([adapter for each in requested for adapter in each.adapters], dtype=np.int64)
            self.slots.bring(adapters)
            slots[np.arange(shape.readers) < counts[:, None]] = self.slots.slots_of(adapters)
        batch.block_table.commit_block_table(len(order))
        logits = self._graphs.step(shape, batch.token_ids_cpu[order, positions], positions, order, slots)
        self._mark_copied()
        self._keep_captured(logits, requested)
        return self._ended()

    def _keep_captured(self, logits: torch.Tensor, requested: Sequence[RequestedRows]) -> None:
        """Puts the requested rows of a step's logits, [S, 1 + m, V], into the answer.

        If they are the whole answer, and in its order, they are not copied.
        """
        width = logits.shape[1]
        rows = logits.flatten(0, 1)
        if len(requested) * width == self._answer_rows and all(
            each.own_row == place * width and each.rows == range(place * width + 1, (place + 1) * width)
            for place, each in enumerate(requested)
        ):
            self._answer = rows[: self._answer_rows]
            return
        source = [
            np.arange(place * width + (each.own_row is None), place * width + 1 + len(each.rows))
            for place, each in enumerate(requested)
        ]
        target = [np.array(([] if each.own_row is None else [each.own_row]) + [*each.rows]) for each in requested]
        self._keep(rows[torch.from_numpy(np.concatenate(source)).to(rows.device)], np.concatenate(target))

    def _mark_copied(self) -> None:
        """Notes that all copies to the device for the coming pass are on their way."""
        if self.device.type != "cpu":
            self._copied = self._copied or torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def _ended(self) -> ModelRunnerOutput:
        """Returns the output of a pass that samples nothing: the tokens of a request come from the engine."""
        batch = self.input_batch
        return ModelRunnerOutput(req_ids=batch.req_ids.copy(), req_id_to_index=batch.req_id_to_index.copy())

    @property
    def _keeps_rows(self) -> bool:
        rank: int = self.vllm_config.parallel_config.rank
        return rank == 0

    def _keep_rows(self, batch: ReaderBatch) -> None:
        if not self._keeps_rows:
            return
        logits = self.execute_model_state.logits
        source = np.concatenate([batch.own, np.arange(batch.requests, batch.requests + batch.readers)])
        target = np.concatenate([batch.own_rows, batch.rows])
        order = np.argsort(target)
        self._keep(logits[torch.from_numpy(source[order]).to(logits.device)], target[order])

    def _keep(self, rows: torch.Tensor, target: np.ndarray) -> None:
        """Puts rows into the answer, at the ascending indices `target`."""
        if not len(target):
            return
        if len(target) == self._answer_rows:
            self._answer = rows
            return
        if self._answer is None:
            self._answer = torch.empty(self._answer_rows, rows.shape[1], dtype=rows.dtype, device=rows.device)
        self._answer[torch.from_numpy(target).to(rows.device)] = rows

    def _prepare_inputs(self, scheduler_output: SchedulerOutput, num_scheduled_tokens: np.ndarray) -> Any:
        """Appends the readers' logits to those of the requests. `_model_forward` puts the readers' states first."""
        self._tokens_computed += scheduler_output.total_num_scheduled_tokens
        self._batch = self._plan(scheduler_output.total_num_scheduled_tokens, num_scheduled_tokens)
        logits_indices, *rest = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)
        if readers := self._batch.readers:
            reader_indices = torch.arange(readers, dtype=logits_indices.dtype, device=logits_indices.device)
            logits_indices = torch.cat([logits_indices + readers, reader_indices])
        return (logits_indices, *rest)

    def _plan(self, tokens: int, num_scheduled_tokens: np.ndarray) -> ReaderBatch:
        """Returns the rows of the requests that reach their last token in this step."""
        requests = self.input_batch.num_reqs
        computed = self.input_batch.num_computed_tokens_cpu[:requests] + num_scheduled_tokens
        owners: list[int] = []
        adapters: list[int] = []
        rows: list[int] = []
        own: list[int] = []
        own_rows: list[int] = []
        for index, request_id in enumerate(self.input_batch.req_ids[:requests]):
            if computed[index] < self.requests[request_id].num_tokens:
                continue
            if request_id in self._texts:
                self._keep_blocks(self._texts[request_id], index)
            if (requested := self._requested.get(request_id)) is None:
                continue
            if requested.own_row is not None:
                own.append(index)
                own_rows.append(requested.own_row)
            owners += [index] * len(requested.adapters)
            adapters += requested.adapters
            rows += requested.rows
        return ReaderBatch(
            requests, tokens, _indices(owners), _indices(adapters), _indices(rows), _indices(own), _indices(own_rows)
        )

    def _keep_blocks(self, text: int, request: int) -> None:
        """Stores a text's row of each block table."""
        tables = self.input_batch.block_table.block_tables
        rows = [table.block_table.cpu[request].clone() for table in tables]
        self._text_blocks = {**self._text_blocks, text: rows}

    def _preprocess(self, *arguments: Any, **options: Any) -> Any:
        inputs = super()._preprocess(*arguments, **options)
        if self._batch is not None and self._text_tokens:
            self.positions[: self._batch.tokens] += self._text_tokens
        return inputs

    def set_active_loras(
        self, input_batch: Any, num_scheduled_tokens: np.ndarray, *arguments: Any, **options: Any
    ) -> None:
        if self._batch is None or self.slots is None:
            super().set_active_loras(input_batch, num_scheduled_tokens, *arguments, **options)
            return
        adapters = input_batch.request_lora_mapping[: self._batch.requests]
        own = np.unique(adapters)  # which follow from no draw, so each of them is loaded once
        self.slots.bring(own[own > 0])
        self._token_adapters = adapters.repeat(num_scheduled_tokens)
        self._map_adapters(self._token_adapters, is_prefill=bool(adapters.any()))

    def _map_adapters(self, adapters: np.ndarray, *, is_prefill: bool) -> None:
        """Sets the adapter of each token of the next pass."""
        mapping = LoRAMapping(tuple(adapters.tolist()), (0,) * len(adapters), is_prefill=is_prefill)
        # The slots are filled already. vLLM would search all loaded adapters for each LoRA request that it gets.
        self.lora_manager.set_active_adapters(set(), mapping)

    def _model_forward(self, *arguments: Any, **options: Any) -> Any:
        self._mark_copied()
        if self._batch is None or not self._batch.readers:
            return super()._model_forward(*arguments, **options)
        if self._runs_together:
            return self._run_together(self._batch, options["input_ids"], options["positions"])
        hidden_states, forks = super()._model_forward(*arguments, **options)
        # Below the first layer nothing was added yet, and vLLM hands out the embeddings themselves: norms that add in
        # place have overwritten them since.
        fork = forks[0] if self._fork else self.get_model().model.embed_input_ids(options["input_ids"])
        return torch.cat([self._run_readers(self._batch, fork), hidden_states]), forks

    @property
    def _runs_together(self) -> bool:
        """Whether one pass runs the readers and, after the fork, the public tokens.

        On a GPU most backends know no mask that differs between queries.
        """
        together: bool = self.device.type == "cpu"
        return together

    def _run_readers(self, batch: ReaderBatch, fork: torch.Tensor) -> torch.Tensor:
        """Runs the layers after the fork for the readers; returns their final hidden states, [readers, hidden].

        Args:
            fork: the public hidden states before the first layer of the readers, [tokens, hidden].
        """
        last_tokens = self._last_tokens(batch)
        positions = self.positions[last_tokens]
        self._use_adapters(batch, _NO_ROWS)
        with self._reader_context(batch, positions, together=False):
            return self._run_layers(positions, fork[last_tokens])

    def _run_together(self, batch: ReaderBatch, input_ids: torch.Tensor, positions: torch.Tensor) -> Any:
        """Runs the layers below the fork for the public tokens, and those after it for readers and public tokens.

        A pass of few rows takes the time to read the weights, so one pass of both is faster than two.
        """
        decoder, tokens = self.get_model().model, len(input_ids)
        states, residual = decoder.embed_input_ids(input_ids), None
        for layer in islice(decoder.layers, self._fork):
            states, residual = layer(positions, states, residual)
        fork = states if residual is None else states + residual
        last_tokens = self._last_tokens(batch)
        positions = torch.cat([positions, positions[last_tokens]])
        self._use_adapters(batch, self._token_adapters)
        with self._reader_context(batch, positions, together=True):
            states = self._run_layers(positions, torch.cat([fork, fork[last_tokens]]))
        return torch.cat([states[tokens:], states[:tokens]]), [fork]

    def _run_layers(self, positions: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Runs the layers after the fork; returns the final hidden states."""
        decoder, residual = self.get_model().model, None
        for layer in islice(decoder.layers, self._fork, None):
            states, residual = layer(positions, states, residual)
        final: torch.Tensor = decoder.norm(states, residual)[0]
        return final

    def _last_tokens(self, batch: ReaderBatch) -> torch.Tensor:
        owners = torch.from_numpy(batch.owners).to(self.device)
        last_tokens: torch.Tensor = self.query_start_loc.gpu[1 : batch.requests + 1].long()[owners] - 1
        return last_tokens

    def _use_adapters(self, batch: ReaderBatch, before: np.ndarray) -> None:
        """Sets the adapters of a pass: those of the tokens before the readers, and the readers'."""
        if self.slots is not None:
            self.slots.bring(batch.adapters)
            # Only requests' own adapters have runs of tokens; reader rows are single tokens.
            self._map_adapters(np.append(before, batch.adapters), is_prefill=bool(before.any()))

    def _reader_context(self, batch: ReaderBatch, positions: torch.Tensor, *, together: bool) -> Any:
        """Returns the forward context of a pass of the readers, or of the public tokens and after them the readers."""
        requests, tokens = (batch.requests, batch.tokens) if together else (0, 0)
        shared = self._queries_are_shared(together)
        first = np.flatnonzero(np.diff(batch.owners, prepend=-1)) if shared else np.arange(batch.readers)
        starts = tokens + np.append(first, batch.readers)
        starts = np.concatenate([self.query_start_loc.np[:requests], starts]).astype(np.int32)
        owners_cpu = torch.from_numpy(batch.owners[first])
        owners = owners_cpu.to(self.device)
        lengths_cpu = self.optimistic_seq_lens_cpu
        lengths = torch.cat([lengths_cpu[:requests], lengths_cpu[owners_cpu] + self._text_tokens])
        texts = batch.adapters[first].tolist() if self._text_tokens else []
        no_slots = torch.full((batch.readers,), -1, dtype=torch.int64, device=self.device)
        own_slots = get_forward_context().slot_mapping if together else {}
        metadata: dict[str, Any] = {}
        slot_mapping: dict[str, torch.Tensor] = {}
        for group, specification in enumerate(self.kv_cache_config.kv_cache_groups):
            slots = no_slots
            if together:
                slots = torch.cat([own_slots[specification.layer_names[0]], no_slots])
            blocks = self._reader_blocks(group, owners, texts)
            common = CommonAttentionMetadata(
                query_start_loc=torch.from_numpy(starts).to(self.device),
                query_start_loc_cpu=torch.from_numpy(starts),
                seq_lens=torch.cat([self.seq_lens[:requests], self.seq_lens[owners] + self._text_tokens]),
                seq_lens_cpu_upper_bound=lengths,
                num_reqs=requests + len(first),
                num_actual_tokens=tokens + batch.readers,
                max_query_len=int(np.diff(starts).max()),
                max_seq_len=int(lengths.max()),
                block_table_tensor=torch.cat([self._blocks(group)[:requests], blocks]),
                slot_mapping=slots,
                causal=_causal(requests, len(first), self.device) if shared and together else not shared,
                is_prefilling=torch.zeros(requests + len(first), dtype=torch.bool),
                positions=positions,
            )
            for attention in self.attn_groups[group]:
                built = attention.build_metadata(common)
                metadata |= dict.fromkeys(attention.layer_names, built)
            slot_mapping |= dict.fromkeys(specification.layer_names, slots)
        return set_forward_context(
            metadata, self.vllm_config, num_tokens=tokens + batch.readers, slot_mapping=slot_mapping
        )

    def _blocks(self, group: int) -> torch.Tensor:
        blocks: torch.Tensor = self.input_batch.block_table.block_tables[group].block_table.gpu
        return blocks

    def _reader_blocks(self, group: int, owners: torch.Tensor, texts: Sequence[int]) -> torch.Tensor:
        """Returns the block tables of the readers' queries: their text's blocks, if any, and their owner's."""
        table = self.input_batch.block_table.block_tables[group]
        own = self._blocks(group)[owners]
        first = self._text_tokens // table.block_size
        if not first:
            return own
        before = torch.stack([self._text_blocks[text][group][:first] for text in texts]).to(self.device)
        return torch.cat([before, own[:, : own.shape[1] - first]], dim=1)

    @property
    def _can_share_queries(self) -> bool:
        """Whether the attention backends, as far as they are known yet, need no causal mask for readers.

        FlashInfer asks the device for lengths then, which a graph cannot hold, and vLLM itself avoids it.
        """
        backends = [group.backend for groups in getattr(self, "attn_groups", None) or () for group in groups]
        return all(backend.supports_non_causal() and backend.get_name() != "FLASHINFER" for backend in backends)

    def _queries_are_shared(self, together: bool) -> bool:
        """Returns whether the readers of a sequence are one query.

        Windows and texts need a query for each reader. In a pass with public tokens the mask differs between queries,
        which of vLLM's backends that of the CPU always supports.
        """
        if self._shared_queries is None:
            layers = self.compilation_config.static_forward_context.values()
            self._shared_queries = self._can_share_queries and not _have_windows(layers)
        differ = together and self.device.type != "cpu"
        return self._shared_queries and not self._text_tokens and not differ


def _have_windows(layers: Iterable[Any]) -> bool:
    return any(getattr(getattr(layer, "impl", None), "sliding_window", None) not in _NONE for layer in layers)


_NONE = (None, -1, (-1, -1))
"""How attention backends write that a layer has no window."""


def _causal(requests: int, readers: int, device: torch.device) -> torch.Tensor:
    """Returns for each query of a pass whether its mask is causal: 1 for requests, 0 for readers."""
    return (torch.arange(requests + readers, device=device) < requests).int()


def _indices(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def refuse_unknown_family(model: Any) -> None:
    """Raises ValueError if the loop over layers of vLLM's model has not been compared with the readers' pass."""
    decoder = type(getattr(model, "model", None))
    if VLLM_FAMILIES.get(decoder.__module__.rpartition(".")[2]) != decoder.__qualname__:
        raise ValueError(f"model: vLLM does not run {type(model).__name__} with parts; use {', '.join(VLLM_FAMILIES)}")


def refuse_unsupported_features(runner: Any) -> None:
    """Raises ValueError if vLLM's model runner has a feature with which a reader row would be silently wrong."""
    parallel = runner.vllm_config.parallel_config
    unsupported = {
        "a multimodal model": runner.supports_mm_inputs,
        "a model with M-RoPE positions": runner.uses_mrope,
        "a model with latent attention (MLA)": runner.model_config.use_mla,
        "speculative decoding": runner.speculative_config is not None,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "data parallelism": parallel.data_parallel_size > 1,
        "context parallelism": parallel.decode_context_parallel_size > 1,
        "microbatches": parallel.use_ubatching,
    }
    lora = runner.vllm_config.lora_config
    unsupported["specialize_active_lora"] = lora is not None and lora.specialize_active_lora
    # vLLM's sliced adapters of experts run on GPUs only, and no test here has compared them.
    unsupported["adapters of a mixture-of-experts model over several devices"] = (
        lora is not None and runner.model_config.is_moe and parallel.tensor_parallel_size > 1
    )
    if features := [name for name, present in unsupported.items() if present]:
        raise ValueError(f"readers do not run with {', '.join(features)}")


class ReaderWorker:
    """Adds to vLLM's workers the method that the engine calls with `collective_rpc`."""

    model_runner: Any

    def on_runner(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the model runner (`ReaderRows`)."""
        return getattr(self.model_runner, method)(*arguments)
