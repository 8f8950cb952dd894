"""A small, slow HTTP service with the routes that a job uses. It counts every released token."""

import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from tests.running import free_port
from tests.support.waiting import until

CONTEXT = 1000


@dataclass
class SmallService:
    """Continues a prompt with the words w1, w2, ..., one token each, after the last such word of the prompt.

    Attributes:
        space: what stands before each word.
        cut: the reason for the end of a text that the budget ends.
    """

    budget: int = 10_000
    break_after: int | None = None
    epsilon: float | None = 8.0
    space: str = " "
    cut: str = "length"
    refuse: list[tuple[int, dict[str, str]]] = field(default_factory=list)
    url: str = ""
    charged: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)

    def app(self) -> FastAPI:
        app = FastAPI()
        app.get("/v1/models")(self.models)
        app.get("/v1/privacy")(self.privacy)
        app.post("/tokenize")(self.tokenize)
        app.post("/v1/completions", response_model=None)(self.completions)
        return app

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [{"id": "privmix", "max_model_len": CONTEXT}]}

    async def privacy(self) -> dict[str, Any]:
        left = max(0, self.budget - self.charged)
        return {
            "guarantee": "Small promise.",
            "epsilon": self.epsilon,
            "delta": 1e-5,
            "adjacency": "user",
            "epsilon_spent": None if self.epsilon is None else self.charged / 1000,
            "tokens_charged": self.charged,
            "tokens_left": left,
            "event": {"kind": "small"},
        }

    async def tokenize(self, request: Request) -> dict[str, int]:
        return {"count": len((await request.json())["prompt"].split())}

    async def completions(self, request: Request) -> StreamingResponse | JSONResponse:
        body = await request.json()
        if self.refuse:
            status, headers = self.refuse.pop(0)
            error = {"message": "not now", "type": "rate_limit_error", "code": "overloaded"}
            return JSONResponse({"error": error}, status, headers)
        if self.charged >= self.budget:
            error = {"message": "used up", "type": "insufficient_quota", "code": "privacy_budget_exhausted"}
            return JSONResponse({"error": error}, 429, {"x-should-retry": "false"})
        self.requests.append(body)
        return StreamingResponse(self._stream(body), media_type="text/event-stream")

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[str]:
        first = body["prompt"].count(" w") + 1
        for number in range(body["max_tokens"]):
            if self.break_after is not None and number == self.break_after:
                self.break_after = None
                yield "data: " + json.dumps({"error": {"message": "a shard was lost"}}) + "\n\n"
                return
            choice: dict[str, Any] = {"index": 0, "text": "", "finish_reason": self.cut}
            chunk: dict[str, Any] = {"choices": [choice], "usage": {"completion_tokens": number}}
            if self.charged >= self.budget:
                chunk["privmix"] = {"ended_by": "privacy_budget"}
                yield "data: " + json.dumps(chunk) + "\n\n"
                break
            self.charged += 1
            chunk["usage"]["completion_tokens"] = number + 1
            choice["text"] = f"{self.space}w{first + number}"
            choice["finish_reason"] = "length" if number + 1 == body["max_tokens"] else None
            yield "data: " + json.dumps(chunk, ensure_ascii=False) + "\n\n"
        yield "data: [DONE]\n\n"


@contextmanager
def serving(service: SmallService) -> Iterator[SmallService]:
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(service.app(), host="127.0.0.1", port=port, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started, 20, pause_s=0.01)
        service.url = f"http://127.0.0.1:{port}"
        yield service
    finally:
        server.should_exit = True
        thread.join()
