"""Serves the HTML pages of the gateway. They load nothing from other hosts."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import HTMLResponse

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
