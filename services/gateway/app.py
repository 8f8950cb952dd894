"""The HTTP routes, from their collaborators; the same app under Ray Serve and in tests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect

from services.gateway.access import CLIENT_GONE, REQUEST_ID, AccessLog, authorise
from services.gateway.catalogue import CatalogueRoutes, version_route
from services.gateway.errors import ApiError, from_http
from services.gateway.generation import ANSWERED_BY, GenerationRoutes
from services.gateway.health import health_routes
from services.gateway.hub import Hub
from services.gateway.metrics import refusals
from services.gateway.openapi import describe
from services.gateway.pages import pages
from services.gateway.prompts import Prompts
from services.gateway.schema import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest
from services.gateway.settings import GatewaySettings
from services.gateway.status import Status

BODIES = (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)


def build_app(
    settings: GatewaySettings, prompts: Prompts, hub: Hub, status: Status, *, answer_request_id: bool = True
) -> FastAPI:
    """The gateway's ASGI application. Its lifespan keeps the hub's line to the coordinator open."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with hub.running():
            yield

    async def authorised(request: Request) -> None:
        authorise(request, settings.api_keys)

    app = FastAPI(title="privmix", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(AccessLog, answer_id=answer_request_id)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID, ANSWERED_BY, "retry-after"],
        )
    for error in (ApiError, HTTPException, ClientDisconnect):
        app.add_exception_handler(error, _refusal)
    app.include_router(health_routes(status))
    app.include_router(version_route())
    app.include_router(pages())
    guarded = [Depends(authorised)]
    app.include_router(GenerationRoutes(settings, prompts, hub).router(), dependencies=guarded)
    app.include_router(CatalogueRoutes(settings, prompts, status).router(), dependencies=guarded)
    describe(app, BODIES)
    return app


def _refusal(_: Request, error: Exception) -> Response:
    match error:
        case ApiError():
            return _counted(error)
        case HTTPException():
            return _counted(from_http(error))
        case _:
            return Response(status_code=CLIENT_GONE)


def _counted(error: ApiError) -> Response:
    refusals.inc(tags={"reason": error.code})
    return error.response()
