"""Liveness, readiness and health: what an operator's tools ask without a key. Nothing here depends on private text."""

from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from services.gateway.status import Status

RETRY_AFTER_S = "5"


class Health(BaseModel):
    """The answer of `/health`: `troubles` says, for each actor in `missing`, why it cannot do its work."""

    status: Literal["ok", "unavailable"]
    missing: list[str]
    troubles: dict[str, str]


def health_routes(status: Status) -> APIRouter:
    """`/livez`: this process answers, and a restart would mend nothing. `/readyz`: a private token can be made and
    charged now. `/health`: as `/readyz`, with what is wrong."""
    router = APIRouter()

    @router.get("/livez")
    async def livez() -> Response:
        return _answer({"status": "ok"}, ready=True)

    @router.get("/readyz")
    async def readyz() -> Response:
        troubles = await status.troubles()
        return _answer({"status": "unavailable" if troubles else "ok"}, ready=not troubles)

    @router.get("/health")
    async def health() -> Response:
        troubles = await status.troubles()
        found = Health(status="unavailable" if troubles else "ok", missing=list(troubles), troubles=troubles)
        return _answer(found.model_dump(), ready=not troubles)

    return router


def _answer(body: dict[str, object], *, ready: bool) -> Response:
    headers = {"cache-control": "no-store", **({} if ready else {"retry-after": RETRY_AFTER_S})}
    return JSONResponse(body, 200 if ready else 503, headers)
