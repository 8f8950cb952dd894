"""vLLM with multi-LoRA as an `Engine`: one resumable vLLM request per (sequence, adapter).

A private token is sampled outside the engine, from a mixture, so no vLLM request can run ahead on tokens of its own.
vLLM's streaming sessions fit exactly: a session ingests a chunk, yields one position's logits, discards the token that
it sampled itself and waits, its cache kept, for the next chunk. An adapter that was not drawn for k tokens ingests them
as one chunk.
"""

import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the logits must stay in this process
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")  # its logits processors have another interface
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # the actor's environment sets the threads
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import torch
from vllm import EngineArgs, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.llm_engine import LLMEngine

from services.engine import lora_on_cpu
from services.engine.engine import PUBLIC, Engine, EngineSettings, Request
from services.engine.logits_capture import REQUEST_KEY, LogitsCapture, Rows

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
MAX_BATCHED_TOKENS = 4096
MAX_BATCHED_ROWS = 256

Key = tuple[str, str]
"""(sequence, adapter)."""


@dataclass(slots=True)
class Session:
    request_id: str
    tokens: tuple[int, ...]


class VllmEngine(Engine):
    """See `Engine`. Caches that do not fit are dropped, least recently asked first, and rebuilt when asked again."""

    def __init__(self, settings: EngineSettings) -> None:
        self._rows = Rows()
        self._llm = LLMEngine.from_engine_args(_engine_args(settings, self._rows))
        self._core = self._llm.engine_core
        self._loras = {
            name: LoRARequest(name, index, str(path)) for index, (name, path) in enumerate(settings.adapters.items(), 1)
        }
        for lora in self._loras.values():
            self._llm.add_lora(lora)
        self.adapters = tuple(self._loras)
        self.context_length = settings.context_length
        self.vocabulary = self._llm.vllm_config.model_config.get_vocab_size()
        cache = self._llm.vllm_config.cache_config
        self._block_size: int = cache.block_size
        self._blocks = (cache.num_gpu_blocks or 0) - 1  # vLLM keeps one block for itself
        self._sessions: OrderedDict[Key, Session] = OrderedDict()
        self._started = 0

    def release(self, sequence: str) -> None:
        self._drop([key for key in self._sessions if key[0] == sequence])

    def close(self) -> None:
        self._llm.engine_core.shutdown()

    def _next_token(self, requests: Sequence[Request]) -> torch.Tensor:
        waves = list(self._waves(requests))
        answers = [self._ask(wave) for wave in waves]
        return answers[0] if len(answers) == 1 else torch.cat(answers)

    def _waves(self, requests: Sequence[Request]) -> Iterator[list[tuple[Key, tuple[int, ...]]]]:
        """Split what is asked so that each wave fits the cache and one scheduler batch."""
        wave: list[tuple[Key, tuple[int, ...]]] = []
        blocks = 0
        for request in requests:
            needed = self._blocks_for(request.tokens)
            for adapter in request.adapters:
                if wave and (blocks + needed > self._blocks or len(wave) == MAX_BATCHED_ROWS):
                    yield wave
                    wave, blocks = [], 0
                wave.append(((request.sequence, adapter), request.tokens))
                blocks += needed
        if wave:
            yield wave

    def _blocks_for(self, tokens: tuple[int, ...]) -> int:
        return len(tokens) // self._block_size + 1

    def _ask(self, wave: list[tuple[Key, tuple[int, ...]]]) -> torch.Tensor:
        self._make_room(wave)
        # vLLM keeps the order it is asked in, and neighbours with one adapter are one product in `lora_on_cpu`.
        ids = {key: self._continue(key, tokens) for key, tokens in sorted(wave, key=_adapter)}
        self._rows.expect([ids[key] for key, _tokens in wave])
        waiting = set(ids.values())
        try:
            while waiting:
                outputs = self._core.get_output().outputs
                waiting.difference_update(output.request_id for output in outputs if output.new_token_ids)
        except BaseException:
            self._drop([key for key, _tokens in wave])  # half-ingested sessions must not be continued
            raise
        return self._rows.take()

    def _make_room(self, wave: list[tuple[Key, tuple[int, ...]]]) -> None:
        asked = {key for key, _tokens in wave}
        idle = [key for key in self._sessions if key not in asked]
        free = self._blocks - sum(self._blocks_for(tokens) for _key, tokens in wave)
        free -= sum(self._blocks_for(self._sessions[key].tokens) for key in idle)
        evicted = []
        for key in idle:
            if free >= 0:
                break
            free += self._blocks_for(self._sessions[key].tokens)
            evicted.append(key)
        self._drop(evicted)

    def _continue(self, key: Key, tokens: tuple[int, ...]) -> str:
        """Hand vLLM what the session has not seen yet, or start it. Returns the vLLM request id."""
        session = self._sessions.get(key)
        if session is not None and not (
            len(session.tokens) < len(tokens) and tokens[: len(session.tokens)] == session.tokens
        ):
            self._drop([key])  # asked again for the same or another context: start over, from the prefix cache
            session = None
        if session is None:
            self._started += 1
            session = Session(f"{self._started}/{key[1]}", ())
            self._sessions[key] = session
        unseen = tokens[len(session.tokens) :]
        session.tokens = tokens
        self._sessions.move_to_end(key)
        self._core.add_request(self._core_request(session.request_id, unseen, key[1]))
        return session.request_id

    def _core_request(self, request_id: str, tokens: tuple[int, ...], adapter: str) -> EngineCoreRequest:
        params = SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, extra_args={REQUEST_KEY: request_id}
        )
        return EngineCoreRequest(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None if adapter == PUBLIC else self._loras[adapter],
            cache_salt=None,
            data_parallel_rank=None,
            resumable=True,
        )

    def _drop(self, keys: list[Key]) -> None:
        self._core.abort_requests([self._sessions.pop(key).request_id for key in keys])


def _adapter(asked: tuple[Key, tuple[int, ...]]) -> str:
    return asked[0][1]


def _engine_args(settings: EngineSettings, rows: Rows) -> EngineArgs:
    if current_platform.is_cpu():
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, round(settings.cache_gib)))
        lora_on_cpu.install()
    configurations = [json.loads((path / "adapter_config.json").read_text()) for path in settings.adapters.values()]
    rank = max((configuration["r"] for configuration in configurations), default=8)
    targets = sorted({module for configuration in configurations for module in configuration["target_modules"]})
    return EngineArgs(
        model=str(settings.model),
        dtype=settings.dtype,
        max_model_len=settings.context_length,
        max_num_seqs=MAX_BATCHED_ROWS,
        max_num_batched_tokens=max(MAX_BATCHED_TOKENS, settings.context_length),
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enable_prefix_caching=True,
        enable_lora=bool(configurations),
        # One slot more than adapters: the CPU's LoRA operators read the last slot for rows without an adapter.
        max_loras=len(configurations) + 1,
        max_lora_rank=next(allowed for allowed in LORA_RANKS if allowed >= rank),
        lora_target_modules=targets or None,
        logits_processors=[LogitsCapture.into(rows)],
        distributed_executor_backend="uni",
        async_scheduling=False,  # every step waits for tokens that only the coordinator can sample
        enforce_eager=current_platform.is_cpu(),
        skip_tokenizer_init=True,
        generation_config="vllm",
        disable_log_stats=True,
    )
