"""Builds the HTTP application, for Ray Serve and for tests."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import APIRouter, FastAPI, Request, Response
from ray.util.metrics import Counter
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse

from privmix.gateway import front_door
from privmix.gateway.access_log import CLIENT_GONE, REQUEST_ID, AccessLog
from privmix.gateway.catalogue import CatalogueRoutes, public_routes
from privmix.gateway.console import ConsoleRoutes
from privmix.gateway.errors import ApiError, from_http
from privmix.gateway.generation import ANSWERED_BY, GenerationRoutes
from privmix.gateway.keys import KeyService
from privmix.gateway.openapi import describe
from privmix.gateway.schema import ChatRequest, CompletionRequest, TokenizeRequest
from privmix.gateway.served_model import ServedModel
from privmix.gateway.settings import RequestSettings

refusals = Counter("privmix_refusals", "Requests that were refused, by the code of OpenAI's error shape.", ("reason",))

_FOLDER = Path(__file__).parent / "static"
# Allows the inline scripts and styles of the pages and requests to this host only.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"content-security-policy": _POLICY, "referrer-policy": "no-referrer", "x-content-type-options": "nosniff"}


def static_pages() -> APIRouter:
    """Returns the routes `/docs` and `/console`. They need no key, because the pages contain no data."""
    router = APIRouter(include_in_schema=False)
    for path, file in {"/docs": "docs.html", "/console": "console.html"}.items():
        text = (_FOLDER / file).read_text(encoding="utf-8")
        router.add_api_route(path, _page(text), methods=["GET"])
    return router


def _page(text: str) -> Callable[[], Awaitable[HTMLResponse]]:
    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers=_HEADERS)

    return page


BODIES = (CompletionRequest, ChatRequest, TokenizeRequest)
EXPOSED = [REQUEST_ID, ANSWERED_BY, "retry-after"]


def build_app(settings: RequestSettings, served: ServedModel) -> FastAPI:
    """Returns the gateway's ASGI application. Its lifespan keeps the channels to the coordinators open."""
    keys = KeyService(settings)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with served.client.running():
            heartbeats = asyncio.create_task(keys.send_heartbeats(served.take_update))
            try:
                yield
            finally:
                heartbeats.cancel()

    def refusal(request: Request, error: Exception) -> Response:
        failure = from_http(error) if isinstance(error, HTTPException) else error
        if not isinstance(failure, ApiError):
            return Response(status_code=CLIENT_GONE)
        refusals.inc(tags={"reason": failure.code})
        served.client.counters.refused(failure.code)
        return failure.response()

    app = FastAPI(title="privmix", lifespan=lifespan, docs_url=None, redoc_url=None, redirect_slashes=False)
    app.add_middleware(AccessLog)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=EXPOSED,
        )
    if front_door.is_there():
        app.add_middleware(front_door.OwnRequests)
    for error in (ApiError, HTTPException, ClientDisconnect):
        app.add_exception_handler(error, refusal)
    for router in (
        public_routes(served, keys),
        static_pages(),
        GenerationRoutes(settings, served, keys).router(),
        CatalogueRoutes(settings, served, keys).router(),
        ConsoleRoutes(settings, served, keys).router(),
    ):
        app.include_router(router)
    describe(app, BODIES)
    return app
