"""What the service is measured against: one vLLM engine behind Ray Serve.

    python -m tests.benchmarks.bare PORT FOLDER --context-length 512 --cache-gib 2 --threads 2

For each completion it decodes a row for the public model and one for each adapter in FOLDER with vLLM's plain
`generate`, and streams the public model's: the engine work of a token that asks every part, and nothing else.
"""

import asyncio
import json
import signal
from collections.abc import AsyncGenerator
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import typer
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.config import HTTPOptions
from vllm import AsyncEngineArgs, SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from cluster.session import connected
from services.engine import lora_on_cpu, vllm_engine
from services.engine.engine import EngineSettings
from services.engine.logits_capture import Rows
from services.training.public_model import resolve


class WithOurOperators:
    """Mixed into vLLM's worker, whose process imports this module for it: the shards' LoRA operators for the CPU."""

    lora_on_cpu.install()


class Bare:
    """OpenAI's streamed completions, as few of them as the measurement reads."""

    def __init__(self, settings: EngineSettings) -> None:
        self._loras = [LoRARequest(name, at, str(path)) for at, (name, path) in enumerate(settings.adapters.items(), 1)]
        self._engine = AsyncLLM.from_engine_args(_engine_args(settings))

    async def stream(self, prompt: str, tokens: int) -> AsyncGenerator[str, None]:
        answer = {"id": uuid4().hex, "object": "text_completion", "created": 0, "model": "bare"}
        silent = asyncio.gather(*(self._decode(prompt, tokens, lora) for lora in self._loras))
        released = 0
        params = _params(tokens, RequestOutputKind.DELTA, detokenize=True)
        async for output in self._engine.generate(prompt, params, uuid4().hex):
            (piece,) = output.outputs
            released += len(piece.token_ids)
            choice = {"index": 0, "text": piece.text, "finish_reason": piece.finish_reason, "logprobs": None}
            yield _event({**answer, "choices": [choice]})
        await silent
        usage = {"prompt_tokens": 0, "completion_tokens": released, "total_tokens": released}
        yield _event({**answer, "choices": [], "usage": usage}) + "data: [DONE]\n\n"

    async def _decode(self, prompt: str, tokens: int, lora: LoRARequest) -> None:
        params = _params(tokens, RequestOutputKind.FINAL_ONLY, detokenize=False)
        async for _ in self._engine.generate(prompt, params, uuid4().hex, lora_request=lora):
            pass


def _engine_args(settings: EngineSettings) -> AsyncEngineArgs:
    """The shard's own, without the capture of its rows and with vLLM's way of running ahead, where it has one."""
    shards = vllm_engine._engine_args(settings, Rows())
    changed = {
        "logits_processors": None,
        "skip_tokenizer_init": False,
        "async_scheduling": None,
        "worker_extension_cls": f"{__name__}.{WithOurOperators.__qualname__}",
    }
    return AsyncEngineArgs(**{field.name: getattr(shards, field.name) for field in fields(shards)} | changed)


def _params(tokens: int, kind: RequestOutputKind, *, detokenize: bool) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=detokenize, output_kind=kind)


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def application(settings: EngineSettings, threads: int) -> serve.Application:
    routes = FastAPI()
    environment = {"env_vars": {"OMP_NUM_THREADS": str(threads)}}

    @serve.deployment(max_ongoing_requests=1024, ray_actor_options={"num_cpus": 1, "runtime_env": environment})
    @serve.ingress(routes)
    class Route:
        def __init__(self, settings: EngineSettings) -> None:
            from tests.benchmarks.bare import Bare  # the deployment travels by value, and vLLM's processes find this

            self._bare = Bare(settings)

        @routes.post("/v1/completions")
        async def completions(self, body: dict[str, Any]) -> StreamingResponse:
            return StreamingResponse(
                self._bare.stream(body["prompt"], body["max_tokens"]), media_type="text/event-stream"
            )

        @routes.get("/health")
        async def health(self) -> dict[str, str]:
            return {"status": "ok"}

    return Route.bind(settings)  # type: ignore[attr-defined]


def main(
    port: int,
    folder: Path,
    context_length: Annotated[int, typer.Option()],
    cache_gib: Annotated[float, typer.Option()],
    threads: Annotated[int, typer.Option()],
) -> None:
    """Serve until SIGTERM."""
    adapters = {path.name: path for path in sorted(folder.iterdir())}
    settings = EngineSettings(resolve(), context_length=context_length, cache_gib=cache_gib, adapters=adapters)
    with connected():
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        serve.run(application(settings, threads), route_prefix="/")
        signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    typer.run(main)
