"""Implements `Engine` with vLLM: one vLLM request for each sequence, with readers as extra rows.

A private token is sampled outside the engine, from a mixture, so a vLLM request must not continue with its own tokens.
The worker samples none (`reader_rows.ReaderRows.sample_tokens`). The engine appends the coordinator's tokens to the
request, in vLLM's scheduler and in its model runner, as vLLM itself does with tokens that it samples. So vLLM computes
them in its next step, hashes their blocks for the prefix cache, and keeps the request when it has nothing to compute.

A request runs the public model; readers are rows that branch off the public ones at the fork and read the same cache
(`reader_rows`). A plain LoRA adapter has a request of its own (`Engine.owners`). The engine calls the pair of a
sequence and a model whose keys and values it holds a session.
"""

import os
import secrets
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the logits must stay in this process
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # `reader_rows` extends the V1 model runner
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the actor's environment sets the threads
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# No pass samples, and a start would compile FlashInfer's sampler, for which an installation has no compiler.
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
from torch import Tensor
from transformers import AutoConfig
from vllm import EngineArgs, SamplingParams
from vllm.config import AttentionConfig
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.request import Request as VllmRequest

from privmix.engine.adapter_config import (
    LORA_RANKS,
    AdapterConfig,
    changed_modules,
    first_layer,
    read_adapter_configs,
    slot_bytes,
    width_of_keys,
)
from privmix.engine.engine import PUBLIC, ZERO, Engine, EngineSettings, EngineStalledError, Request, cpu_cache_gib
from privmix.engine.part_text import read_texts
from privmix.engine.reader_rows import FORK, PART_KIND, READERS, RequestedRows
from privmix.engine.step_graph import shapes

MIN_GPU_RANK = 16
"""The least rank of adapter slots on a GPU: its tensor cores multiply 16 rows at a time."""
MAX_SESSIONS = 512
"""The maximum number of sessions with caches. vLLM counts waiting sessions too, and admits no more than this."""
MAX_READERS = 1024
"""The maximum number of reader rows in one step of vLLM."""
MAX_SCHEDULED_TOKENS = 4096
SLOTS_MEMORY = 0.25
"""The share of a GPU's memory for adapter slots; see `adapter_slots` for the cost of a larger ensemble."""
MIN_SLOTS = 32
MERGED = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj", "up_proj": "gate_up_proj"}
"""vLLM's names of the layers that merge a reader's modules."""
TENSOR_PARALLEL = "privmix.engine.tensor_parallel.TensorParallelExecutor"
MAX_IDLE_STEPS = 16
"""The number of consecutive vLLM steps without computation after which the engine counts as stalled."""
MAX_REPEATED_WORK = 8
"""How often vLLM may recompute its tokens, after preemptions, before the engine counts as stalled."""
APPENDS = SamplingParams(max_tokens=2**31 - 1, ignore_eos=True, detokenize=False)
"""What vLLM knows of sampling: nothing ends a request but the engine."""

SessionKey = tuple[str, str]
"""Identifies a session: the sequence, and the model whose keys and values it holds (`PUBLIC` or an adapter)."""


@dataclass(slots=True)
class Session:
    """Holds the state of a session.

    Attributes:
        request: the vLLM request.
        tokens: a context, which may have grown since.
        known: the number of its first tokens that vLLM has.
    """

    request: VllmRequest
    tokens: Sequence[int]
    known: int

    def is_extended_by(self, tokens: Sequence[int]) -> bool:
        """Returns whether a context continues this session's. Compares each context only once."""
        if self.known >= len(tokens):
            return False
        if tokens is not self.tokens:
            if list(tokens[: self.known]) != list(self.tokens[: self.known]):
                return False
            self.tokens = tokens
        return True


@dataclass(slots=True)
class SessionRequest:
    """Requests rows of one session at the last of `tokens`, with their positions in the result."""

    key: SessionKey
    tokens: Sequence[int]
    cache_salt: str | None
    own_row: int | None
    readers: Sequence[int]
    reader_rows: Sequence[int]


class StepLimits(NamedTuple):
    """Holds the maximum numbers of sequences and of readers in one step."""

    sequences: int
    readers: int


class VllmEngine(Engine):
    """Implements `Engine`. Evicts the least recently used caches and rebuilds them on demand."""

    def __init__(self, settings: EngineSettings) -> None:
        configs = read_adapter_configs(settings.adapters, settings.part_kind)
        texts = read_texts(settings.adapters) if settings.part_kind == "text" else {}
        self._llm = LLMEngine.from_engine_args(_engine_args(settings, configs, texts))
        self._core = self._llm.engine_core
        self.adapters = tuple(settings.adapters)
        self.context_length = settings.context_length
        self.vocabulary = self._llm.vllm_config.model_config.get_vocab_size()
        self.owners = self.adapters if settings.part_kind == "lora" else ()
        self._lora_ids = {name: index for index, name in enumerate((*self.adapters, ZERO), 1)}
        self._loras = {
            name: LoRARequest(name, self._lora_ids[name], str(path))
            for name, path in settings.adapters.items()
            if not texts
        }
        if self._loras:
            rank, targets = _rank_and_targets(configs)
            self._worker("load_adapters", list(self._loras.values()), self._lora_ids[ZERO], rank, targets)
        self._captured: frozenset[int] = frozenset()
        self.capture({0, settings.rows})
        cache = self._llm.vllm_config.cache_config
        self._block_size: int = cache.block_size
        self._blocks = (cache.num_gpu_blocks or 0) - 1  # vLLM keeps one block for itself
        lora = self._llm.vllm_config.lora_config
        slots: int = lora.max_loras if lora else len(texts) + 1
        # Where not all adapters have a slot, every row counts as one, whichever adapters the rows share: the number of
        # steps must not depend on the draw.
        self._slots = None if len(settings.adapters) < slots else slots
        self._sessions: OrderedDict[SessionKey, Session] = OrderedDict()
        self._most_sessions = _most_sessions(settings)
        self._started = 0
        if self.owners:
            self._check_room()
        if texts:
            self._ingest(texts)

    def capture(self, readers: Collection[int]) -> None:
        """Captures the decode steps of requests with these numbers of part rows, where the device can."""
        largest_first = sorted(readers, reverse=True)  # smaller steps use the memory of larger ones
        self._captured |= frozenset(self._worker("capture_steps", largest_first))

    def drop_caches(self, sequence: str) -> None:
        self._drop([key for key in self._sessions if key[0] == sequence])

    def close(self) -> None:
        self._core.shutdown()

    def _ingest(self, texts: Mapping[str, Tensor]) -> None:
        """Lets vLLM read the texts, whose cache blocks stay occupied.

        Raises:
            ValueError: the texts do not fill whole blocks, or the cache has no room for them and one sequence.
        """
        size = len(next(iter(texts.values())))
        if size % self._block_size:
            raise ValueError(f"text: must be a multiple of the cache's {self._block_size} tokens, not {size}")
        occupied = (len(texts) + 1) * (size // self._block_size + 1)
        if occupied + self._blocks_for(self.context_length) > self._blocks:
            raise ValueError(
                f"cache_gib: {len(texts)} texts of {size} tokens and one sequence need {occupied} blocks and more, but "
                f"the cache has {self._blocks}; raise cache_gib, or lower parts_per_shard"
            )
        requests = {name: tuple(text.tolist()) for name, text in texts.items()} | {ZERO: (0,) * size}
        secret = secrets.token_hex(16)  # no sequence shares a cached prefix with a text
        for name, tokens in requests.items():
            session = SessionRequest((name, PUBLIC), tokens, secret, None, [], [])
            request = self._continue(session, {})
            self._worker("begin_texts", {request.request_id: self._lora_ids[name]})
            self._run([request])
            del self._sessions[session.key]  # but not in vLLM, which keeps the blocks
        self._worker("finish_texts", size)
        self._blocks -= occupied

    def _check_room(self) -> None:
        """Raises ValueError if the cache does not hold all caches of one sequence: each token would compute it anew."""
        parts, needed = len(self.owners), (1 + len(self.owners)) * self._blocks_for(self.context_length)
        if needed > self._blocks:
            raise ValueError(
                f"cache_gib: with {parts} plain LoRA parts a sequence has {1 + parts} caches, which need {needed} "
                f"blocks for context_length {self.context_length}, but the cache has {self._blocks}; raise cache_gib "
                "(on a GPU gpu_memory_utilization), or lower parts_per_shard or context_length"
            )

    def _unchecked(self, request: Request) -> Sequence[int]:
        return self._unseen((request.sequence, PUBLIC), request.tokens)

    def _check(self, requests: Sequence[Request]) -> None:
        super()._check(requests)
        for request in requests:
            if self._blocks_for(len(request.tokens)) > self._blocks:
                raise ValueError(
                    f"tokens: a context of {len(request.tokens)} tokens is more than the cache holds; raise "
                    "cache_gib, or lower context_length"
                )

    def _logits(self, requests: Sequence[Request]) -> torch.Tensor:
        rows: int | None = sum(len(request.adapters) for request in requests)
        captured = self._is_captured(requests)
        limits = self._limits(max(len(request.adapters) for request in requests) if captured else None)
        for step in self._steps(requests, limits):
            self._make_room(step)
            if captured:
                self._ingest_all_but_the_last(step)
            self._compute(step, rows)
            rows = None  # the other steps continue the answer
        answer: torch.Tensor = self._worker("take_answer")
        return answer

    def _is_captured(self, requests: Sequence[Request]) -> bool:
        """Returns whether captured steps answer these requests."""
        return all(
            len(request.adapters) - 1 in self._captured and request.adapters[0] == PUBLIC for request in requests
        )

    def _limits(self, rows: int | None) -> StepLimits:
        """Returns the limits of a step, captured for at most this number of rows a request; None if it is not."""
        if rows is None:
            sequences, readers = self._most_sessions, MAX_READERS
        else:
            sequences = min(MAX_SESSIONS, shapes(rows - 1)[0].sequences)
            readers = sequences * (rows - 1)
        return StepLimits(sequences, readers if self._slots is None else min(readers, self._slots))

    def _ingest_all_but_the_last(self, step: Sequence[SessionRequest]) -> None:
        """Computes the tokens before the last ones: a captured step computes one token of each sequence."""
        before = [
            replace(asked, tokens=asked.tokens[:-1], own_row=None, readers=[], reader_rows=[])
            for asked in step
            if len(self._unseen(asked.key, asked.tokens)) > 1
        ]
        if before:
            self._compute(before, None)

    def _unseen(self, key: SessionKey, tokens: Sequence[int]) -> Sequence[int]:
        """Returns the tokens of a context that its session lacks: all, if the context does not continue it."""
        session = self._sessions.get(key)
        return tokens[session.known :] if session is not None and session.is_extended_by(tokens) else tokens

    def _steps(self, requests: Sequence[Request], limits: StepLimits) -> Iterator[list[SessionRequest]]:
        """Yields the session requests of each step. Their number and order do not depend on a draw."""
        if not self.owners:
            yield from self._divided(self._session_requests(requests, limits), limits)
            return
        size = self._slots or len(self.owners)
        for start in range(0, len(self.owners), size):  # only adapters that have slots together share a step
            names = {*self.owners[start : start + size], *((PUBLIC,) if not start else ())}
            yield from self._divided(_own_session_requests(requests, names), limits)

    def _session_requests(self, requests: Sequence[Request], limits: StepLimits) -> Iterator[SessionRequest]:
        """Yields a request for each session, or several if a request has more readers than fit into a step."""
        row = 0
        for request in requests:
            rows = range(row, row + len(request.adapters))
            row = rows.stop
            if request.adapters[:1] == (PUBLIC,) and len(rows) - 1 <= limits.readers:
                readers = [self._lora_ids[name] for name in request.adapters[1:]]
                yield _session_request(request, PUBLIC, rows[0], readers, rows[1:])
            else:
                yield from self._split(request, rows, limits.readers)

    def _split(self, request: Request, rows: range, limit: int) -> Iterator[SessionRequest]:
        """Yields requests for the session of a request, with at most `limit` readers each."""
        named = list(zip(request.adapters, rows, strict=True))
        own = next((row for name, row in named if name == PUBLIC), None)
        readers = [(self._lora_ids[name], row) for name, row in named if name != PUBLIC]
        for start in range(0, max(len(readers), own is not None), limit):
            ids, at = zip(*readers[start : start + limit], strict=True) if readers else ((), ())
            yield _session_request(request, PUBLIC, None if start else own, ids, at)

    def _divided(self, asked: Iterable[SessionRequest], limits: StepLimits) -> Iterator[list[SessionRequest]]:
        """Divides the requests into steps that fit the cache, the sessions, the rows and the adapter slots."""
        step: list[SessionRequest] = []
        blocks = readers = 0
        keys: set[SessionKey] = set()
        for session_request in asked:
            needed = self._blocks_for(len(session_request.tokens))
            if step and (
                session_request.key in keys
                or len(step) == limits.sequences
                or blocks + needed > self._blocks
                or readers + len(session_request.readers) > limits.readers
            ):
                yield step
                step, blocks, readers = [], 0, 0
                keys = set()
            step.append(session_request)
            blocks += needed
            readers += len(session_request.readers)
            keys.add(session_request.key)
        if step:
            yield step

    def _blocks_for(self, tokens: int) -> int:
        return tokens // self._block_size + 1

    def _compute(self, step: list[SessionRequest], rows: int | None) -> None:
        """Computes the rows of a step.

        Args:
            rows: see `ReaderRows.begin_step`.

        Raises:
            RuntimeError: a pass failed. Whatever its error, vLLM may keep cache blocks as computed that are not.
        """
        try:
            appended: dict[str, Sequence[int]] = {}
            requests = [self._continue(session_request, appended) for session_request in step]
            requested = {
                request.request_id: RequestedRows(asked.own_row, asked.readers, asked.reader_rows)
                for request, asked in zip(requests, step, strict=True)
            }
            self._worker("begin_step", requested, appended, rows)
            self._run(requests)
        except BaseException as error:
            self._drop([session_request.key for session_request in step])  # a partly ingested session cannot continue
            if isinstance(error, ValueError):  # callers take it for a refusal, and `_check` has refused what it can
                raise RuntimeError(f"a pass failed: {error}") from error
            raise

    def _run(self, requests: Sequence[VllmRequest]) -> None:
        """Runs vLLM until it has computed all tokens of these requests.

        Raises:
            EngineStalledError: vLLM computes nothing for `MAX_IDLE_STEPS` steps, or recomputes its tokens too often.
        """
        idle, counts = 0, []
        while True:
            self._core.get_output()
            waiting = [request for request in requests if request.num_computed_tokens < request.num_tokens]
            if not waiting:
                return
            counts.append(self._worker("tokens_computed"))
            idle = idle + 1 if counts[-2:-1] == counts[-1:] else 0
            repeated = counts[-1] - counts[0] > MAX_REPEATED_WORK * sum(request.num_tokens for request in requests)
            if idle > MAX_IDLE_STEPS or repeated:
                raise EngineStalledError(
                    f"vLLM makes no progress with {len(waiting)} of its requests ({len(self._sessions)} sessions, "
                    f"{self._blocks} cache blocks of {self._block_size} tokens)"
                )

    def _make_room(self, step: Sequence[SessionRequest]) -> None:
        """Evicts the least recently used sessions until the step's sessions fit."""
        needed = {session_request.key for session_request in step}
        idle = [key for key in self._sessions if key not in needed]
        free_blocks = self._blocks - sum(self._blocks_for(len(session_request.tokens)) for session_request in step)
        free_blocks -= sum(self._blocks_for(self._sessions[key].known) for key in idle)
        free_sessions = self._most_sessions - len(needed) - len(idle)
        evicted = []
        for key in idle:
            if free_blocks >= 0 and free_sessions >= 0:
                break
            free_blocks += self._blocks_for(self._sessions[key].known)
            free_sessions += 1
            evicted.append(key)
        self._drop(evicted)

    def _continue(self, session_request: SessionRequest, appended: dict[str, Sequence[int]]) -> VllmRequest:
        """Gives vLLM's scheduler the session's new tokens, starting a session if needed; returns the vLLM request.

        Args:
            appended: receives the tokens that the workers must append too, by vLLM request id.
        """
        key, tokens = session_request.key, session_request.tokens
        session = self._sessions.get(key)
        if session is not None and not session.is_extended_by(tokens):
            self._drop([key])  # the context does not extend the session's: restart, from the prefix cache
            session = None
        if session is None:
            session = Session(self._start(session_request), tokens, len(tokens))
            self._sessions[key] = session
        else:
            unseen = list(tokens[session.known :])
            session.request.append_output_token_ids(unseen)
            appended[session.request.request_id] = unseen
            session.known = len(tokens)
        self._sessions.move_to_end(key)
        return session.request

    def _start(self, session_request: SessionRequest) -> VllmRequest:
        """Returns a new vLLM request with the context as its prompt."""
        self._started += 1
        request_id = str(self._started)
        self._core.add_request(
            EngineCoreRequest(
                request_id=request_id,
                prompt_token_ids=list(session_request.tokens),
                mm_features=None,
                sampling_params=APPENDS,
                pooling_params=None,
                arrival_time=0.0,
                lora_request=self._loras.get(session_request.key[1]),
                cache_salt=session_request.cache_salt,
                data_parallel_rank=None,
            )
        )
        request: VllmRequest = self._core.engine_core.scheduler.requests[request_id]
        return request

    def _drop(self, keys: list[SessionKey]) -> None:
        sessions = [self._sessions.pop(key, None) for key in keys]
        self._core.abort_requests([session.request.request_id for session in sessions if session is not None])

    def _worker(self, method: str, *arguments: Any) -> Any:
        """Calls a method of `ReaderRows` in each worker; returns what it returns in this process."""
        return self._core.collective_rpc("on_runner", args=(method, *arguments))[0]


def _session_request(
    request: Request, owner: str, own_row: int | None, readers: Sequence[int], rows: Sequence[int]
) -> SessionRequest:
    return SessionRequest((request.sequence, owner), request.tokens, request.cache_salt, own_row, readers, rows)


def _own_session_requests(requests: Sequence[Request], names: Collection[str]) -> Iterator[SessionRequest]:
    """Yields a request for each row of a model in `names`, all of which have sessions of their own."""
    rows = ((request, name) for request in requests for name in request.adapters)
    for row, (request, name) in enumerate(rows):
        if name in names:
            yield _session_request(request, name, row, (), ())


def _most_sessions(settings: EngineSettings) -> int:
    """Returns the maximum number of sessions with caches. Plain LoRA has many a sequence, and in place of readers."""
    return MAX_SESSIONS + MAX_READERS if settings.part_kind == "lora" else MAX_SESSIONS


def _rank_and_targets(configs: Sequence[AdapterConfig]) -> tuple[int, list[str]]:
    rank = max((config.rank for config in configs), default=1)
    return rank, sorted({module for config in configs for module in config.targets})


def _lora_modules(settings: EngineSettings, targets: Sequence[str], fork: int) -> list[str]:
    """Returns the modules for which vLLM allocates adapter slots; by full names if the lower layers need none."""
    if not fork:
        return list(targets)
    names = changed_modules(next(iter(settings.adapters.values())))
    merged = [(name.rpartition("."), MERGED.get(name.rpartition(".")[2])) for name in names]
    return sorted({*names, *(f"{parent}.{name}" for (parent, _, _), name in merged if name)})


def _gpu_slots(settings: EngineSettings, rank: int, model: Any) -> int:
    """Returns the number of adapter slots: one for each adapter and for `ZERO`, limited by `SLOTS_MEMORY`.

    Args:
        rank: the rank of vLLM's buffers.
        model: the configuration of the base model.
    """
    adapters = len(settings.adapters)
    if settings.part_kind == "text" or not adapters:
        return adapters + 1
    devices = settings.tensor_parallel_size
    itemsize = getattr(torch, settings.dtype).itemsize
    size = slot_bytes(next(iter(settings.adapters.values())), rank, itemsize, width_of_keys(model, devices), devices)
    memory = current_platform.get_device_total_memory() * settings.gpu_memory_utilization * SLOTS_MEMORY
    return min(adapters + 1, max(MIN_SLOTS, int(memory // size)))


def _head_dtype(on_cpu: bool) -> str:
    """Returns the type of the head's sums, for plain steps and readers alike, as vLLM names it.

    A GPU writes the float32 sums of its product instead of rounding them (`torch.mm` with `out_dtype`), which costs
    nothing. vLLM's batch-invariant product has no such output. On a CPU, vLLM would convert the head's weights in every
    step.
    """
    batch_invariant = bool(int(os.environ.get("VLLM_BATCH_INVARIANT", "0")))
    return "model" if on_cpu or batch_invariant else "float32"


def _engine_args(settings: EngineSettings, configs: Sequence[AdapterConfig], texts: Mapping[str, Tensor]) -> EngineArgs:
    on_cpu = current_platform.is_cpu()
    if on_cpu:
        cache_gib = settings.cache_gib / settings.tensor_parallel_size  # vLLM gives it to each process
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(cpu_cache_gib(cache_gib))
    rank, targets = _rank_and_targets(configs)
    rank = next(allowed for allowed in LORA_RANKS if allowed >= max(rank, 0 if on_cpu else MIN_GPU_RANK))
    model = AutoConfig.from_pretrained(settings.model).get_text_config()
    fork = 0 if settings.part_kind == "lora" else first_layer(configs, model.num_hidden_layers)
    if configs and not on_cpu and settings.dtype == "float32":
        raise ValueError("dtype: vLLM's adapters run in bfloat16 or float16 on a GPU, not in float32; set engine.dtype")
    worker = "cpu_reader_worker.CPUReaderWorker" if on_cpu else "gpu_reader_worker.GPUReaderWorker"
    slots = len(configs) + 1 if on_cpu else _gpu_slots(settings, rank, model)  # one more for the zero adapter
    text_tokens = max(map(len, texts.values()), default=0)
    kept = len(texts) + 1 if texts else 0
    return EngineArgs(
        model=str(settings.model),
        dtype=settings.dtype,
        hf_overrides={"head_dtype": _head_dtype(on_cpu)},
        max_model_len=settings.context_length + text_tokens,
        max_num_seqs=MAX_SESSIONS + MAX_READERS + kept,
        max_num_active_seqs=_most_sessions(settings) + kept,
        max_num_batched_tokens=max(MAX_SCHEDULED_TOKENS, MAX_READERS),
        max_num_scheduled_tokens=MAX_SCHEDULED_TOKENS,
        enable_chunked_prefill=True,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enable_prefix_caching=True,
        enable_lora=bool(configs),
        max_loras=slots,
        max_cpu_loras=len(configs) + 1,
        max_lora_rank=rank,
        lora_target_modules=_lora_modules(settings, targets, fork) or None,
        additional_config={FORK: fork, READERS: settings.rows, PART_KIND: settings.part_kind},
        worker_cls=f"privmix.engine.{worker}",
        tensor_parallel_size=settings.tensor_parallel_size,
        distributed_executor_backend="uni" if settings.tensor_parallel_size == 1 else TENSOR_PARALLEL,
        async_scheduling=False,  # every step waits for tokens that the coordinator samples
        enforce_eager=True,  # a GPU's decode steps are captured by `step_graph`
        # Readers need no causal mask (`reader_rows`); there vLLM would choose a backend that needs one in graphs.
        attention_config=AttentionConfig(use_non_causal=current_platform.is_device_capability_family(100)),
        load_format=settings.load_format,
        skip_tokenizer_init=True,
        generation_config="vllm",
        disable_log_stats=True,
    )
