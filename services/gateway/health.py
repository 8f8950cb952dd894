"""Liveness, readiness and health: what an operator's tools ask without a key. Nothing here depends on private text."""

import asyncio
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from services.gateway.served import Models

RETRY_AFTER_S = "5"


class Health(BaseModel):
    """The answer of `/health`: `troubles` says, for each actor in `missing`, why it cannot do its work.

    In a service with several models an actor is named `MODEL/ACTOR`, and `status` is "degraded" where some of the
    models cannot be used.
    """

    status: Literal["ok", "degraded", "unavailable"]
    missing: list[str]
    troubles: dict[str, str]


def health_routes(models: Models) -> APIRouter:
    """`/livez`: this process answers, and a restart would mend nothing. `/readyz`: a private token of some model can be
    made and charged now. `/health`: as `/readyz`, with what is wrong."""
    router = APIRouter()

    @router.get("/livez")
    async def livez() -> Response:
        return _answer({"status": "ok"}, ready=True)

    @router.get("/readyz")
    async def readyz() -> Response:
        found = await _health(models)
        ready = found.status != "unavailable"
        return _answer({"status": "ok" if ready else "unavailable"}, ready=ready)

    @router.get("/health")
    async def health() -> Response:
        found = await _health(models)
        return _answer(found.model_dump(), ready=found.status != "unavailable")

    return router


async def _health(models: Models) -> Health:
    serving = [served for served in models.all if served.state == "serving"]
    found = await asyncio.gather(*(served.status.troubles() for served in serving))
    works = [not troubles for troubles in found]
    alone = len(models.all) == 1
    troubles = {
        actor if alone else f"{served.ensemble.name}/{actor}": trouble
        for served, theirs in zip(serving, found, strict=True)
        for actor, trouble in theirs.items()
    }
    status: Literal["ok", "degraded", "unavailable"] = "degraded" if any(works) else "unavailable"
    return Health(status="ok" if works and all(works) else status, missing=list(troubles), troubles=troubles)


def _answer(body: dict[str, object], *, ready: bool) -> Response:
    headers = {"cache-control": "no-store", **({} if ready else {"retry-after": RETRY_AFTER_S})}
    return JSONResponse(body, 200 if ready else 503, headers)
