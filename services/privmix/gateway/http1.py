"""Has Ray Serve's proxies read HTTP with h11. They call `middlewares` if `VARIABLE` names it in their environment.

uvicorn prefers httptools, which loses the body of a request with `Upgrade: h2c`, and which sends chunk sizes to clients
of HTTP/1.0: https://github.com/Kludex/uvicorn/issues/2722 and https://github.com/Kludex/uvicorn/pull/1360. h11 has
neither fault, and costs 5 us more for each chunk of an answer.
"""

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.config import HTTP_PROTOCOLS, WS_PROTOCOLS
from uvicorn.protocols.http.h11_impl import H11Protocol

from privmix.gateway.errors import ApiError

VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = f"{__name__}:middlewares"


def middlewares() -> list[Middleware]:
    """Selects the protocol of the servers that this process starts, and returns what Serve adds before its proxy."""
    HTTP_PROTOCOLS["auto"] = f"{__name__}:HttpProtocol"
    WS_PROTOCOLS["auto"] = None  # no route has WebSockets, and a request that offers them is answered without them
    return [Middleware(OriginForm)]


class HttpProtocol(H11Protocol):
    """Refuses what is not HTTP in OpenAI's format."""

    def send_400_response(self, msg: str) -> None:
        message = "this is not valid HTTP/1.1; check its first line, Host, Content-Length and Transfer-Encoding"
        refused = ApiError(400, message, code="invalid_http").response()
        headers = b"".join(b"%b: %b\r\n" % header for header in refused.raw_headers)
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            start = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\n"
            self.transport.write(start + headers + b"\r\n" + refused.body)
        self.transport.close()  # also amid an answer, which cannot be refused any more


class OriginForm:
    """Reduces a target such as `http://localhost:8000/v1/models`, as clients send it to proxies, to its path."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith("/"):
            scope["path"] = "/" + scope["path"].partition("://")[2].partition("/")[2]
            scope["raw_path"] = b"/" + scope["raw_path"].partition(b"://")[2].partition(b"/")[2]
        await self._app(scope, receive, send)
