"""Serves the baseline without privacy: the same model in plain vLLM behind HAProxy and Ray Serve, without parts.

    python -m tests.benchmarks.plain PORT MODEL --context-length 1024 --cache-gib 2 --threads 2

Uses vLLM's defaults: one request per sequence, which continues with its own sampled tokens. Only on a CPU, both sides
run without compilation, which takes minutes, and with the worker in the engine's process. Decodes greedily and streams
the fields of OpenAI's completions that the measurement needs.
"""

import json
import os
import signal
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Annotated, Any
from uuid import uuid4

import ray
import typer
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.config import HTTPOptions

from privmix.foundation.ray_session import connected
from privmix.gateway.front_door import prepared


class Plain:
    """Streams OpenAI's completions from vLLM's asynchronous engine."""

    def __init__(self, model: Path, context_length: int, gpu_share: float) -> None:
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=str(model),
            dtype="bfloat16",
            max_model_len=context_length,
            gpu_memory_utilization=gpu_share,
            enforce_eager=current_platform.is_cpu(),
            distributed_executor_backend="uni",
        )
        self._engine = AsyncLLM.from_engine_args(arguments)

    async def stream(self, prompt: Sequence[int], tokens: int) -> AsyncGenerator[str, None]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA
        )
        answer = {"id": uuid4().hex, "object": "text_completion", "created": 0, "model": "plain"}
        released = 0
        async for output in self._engine.generate({"prompt_token_ids": list(prompt)}, params, uuid4().hex):
            (piece,) = output.outputs
            released += len(piece.token_ids)
            choice = {"index": 0, "text": piece.text, "finish_reason": piece.finish_reason, "logprobs": None}
            yield _event({**answer, "choices": [choice]})
        usage = {"prompt_tokens": len(prompt), "completion_tokens": released, "total_tokens": len(prompt) + released}
        yield _event({**answer, "choices": [], "usage": usage}) + "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


def application(model: Path, context_length: int, cache_gib: int, threads: int, gpu_share: float) -> serve.Application:
    routes = FastAPI()
    environment = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # see `vllm_engine`
        "VLLM_LOGGING_LEVEL": "WARNING",
    }
    options = {
        "num_cpus": 1,
        "num_gpus": ray.cluster_resources().get("GPU", 0),
        "runtime_env": {"env_vars": environment},
    }

    @serve.deployment(max_ongoing_requests=1024, ray_actor_options=options)
    @serve.ingress(routes)
    class Route:
        def __init__(self) -> None:
            # The deployment is pickled by value, and vLLM's processes need an importable class.
            from tests.benchmarks.plain import Plain

            self._plain = Plain(model, context_length, gpu_share)

        @routes.post("/v1/completions")
        async def completions(self, body: dict[str, Any]) -> StreamingResponse:
            return StreamingResponse(
                self._plain.stream(body["prompt"], body["max_tokens"]), media_type="text/event-stream"
            )

        @routes.get("/health")
        async def health(self) -> dict[str, str]:
            return {"status": "ok"}

    return Route.bind()  # type: ignore[attr-defined]


def main(
    port: int,
    model: Path,
    context_length: Annotated[int, typer.Option()],
    cache_gib: Annotated[int, typer.Option()],
    threads: Annotated[int, typer.Option()] = os.cpu_count() or 1,
    gpu_share: Annotated[float, typer.Option(help="Of the memory of a GPU, if there is one.")] = 0.9,
) -> None:
    """Serves until SIGTERM."""
    with prepared(), connected():
        serve.start(http_options=HTTPOptions(host="127.0.0.1", port=port))
        serve.run(application(model, context_length, cache_gib, threads, gpu_share), route_prefix="/")
        signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    typer.run(main)
