"""Implements the routes for liveness, readiness and health. They need no key and do not depend on private text."""

import asyncio
from typing import Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import JSONResponse, Response

from services.gateway.keys import KeyService
from services.gateway.models import Models

RETRY_AFTER_S = "5"


class Health(BaseModel):
    """Holds the response of `/health`. `troubles` says for each actor in `missing` why it cannot work.

    Without the keys actor and its database, no request is admitted, so the status is "unavailable".

    In a service with several models, an actor is named `MODEL/ACTOR`, and `status` is "degraded" if some of the models
    are unavailable.
    """

    status: Literal["ok", "degraded", "unavailable"]
    missing: list[str]
    troubles: dict[str, str]


def health_routes(models: Models, keys: KeyService) -> APIRouter:
    """Returns the routes `/livez`, `/readyz` and `/health`.

    `/livez` succeeds while this process runs. `/readyz` succeeds if keys can be checked and some model can generate and
    charge a private token now. `/health` adds the reasons.
    """
    router = APIRouter()

    @router.get("/livez")
    async def livez() -> Response:
        return _response({"status": "ok"}, ready=True)

    @router.get("/readyz")
    async def readyz() -> Response:
        state = await _health(models, keys)
        ready = state.status != "unavailable"
        return _response({"status": "ok" if ready else "unavailable"}, ready=ready)

    @router.get("/health")
    async def health() -> Response:
        state = await _health(models, keys)
        return _response(state.model_dump(), ready=state.status != "unavailable")

    return router


async def _health(models: Models, keys: KeyService) -> Health:
    serving = [served for served in models.all if served.state == "serving"]
    keys_trouble, troubles_by_model = await asyncio.gather(
        keys.trouble(), asyncio.gather(*(served.status.troubles() for served in serving))
    )
    works = [not model_troubles for model_troubles in troubles_by_model]
    only_model = len(models.all) == 1
    troubles = {
        actor if only_model else f"{served.ensemble.name}/{actor}": trouble
        for served, model_troubles in zip(serving, troubles_by_model, strict=True)
        for actor, trouble in model_troubles.items()
    }
    if keys_trouble is not None:
        return Health(status="unavailable", missing=["keys", *troubles], troubles={"keys": keys_trouble, **troubles})
    status: Literal["ok", "degraded", "unavailable"] = "degraded" if any(works) else "unavailable"
    return Health(status="ok" if works and all(works) else status, missing=list(troubles), troubles=troubles)


def _response(body: dict[str, object], *, ready: bool) -> Response:
    headers = {"cache-control": "no-store", **({} if ready else {"retry-after": RETRY_AFTER_S})}
    return JSONResponse(body, 200 if ready else 503, headers)
