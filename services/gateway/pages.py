"""The pages that a browser shows, from files beside this one: no page loads anything from another host."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import HTMLResponse

_FOLDER = Path(__file__).parent / "static"
# Inline scripts and styles of our own; nothing from elsewhere, nothing in frames.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {"content-security-policy": _POLICY, "referrer-policy": "no-referrer", "x-content-type-options": "nosniff"}


def pages() -> APIRouter:
    """`/docs` and `/console`; they need no key, because they hold nothing but themselves."""
    router = APIRouter(include_in_schema=False)
    for path, file in {"/docs": "docs.html", "/console": "console.html"}.items():
        text = (_FOLDER / file).read_text(encoding="utf-8")
        router.add_api_route(path, _page(text), methods=["GET"])
    return router


def _page(text: str) -> Callable[[], Awaitable[HTMLResponse]]:
    async def page() -> HTMLResponse:
        return HTMLResponse(text, headers=_HEADERS)

    return page
