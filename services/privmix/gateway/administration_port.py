"""Serves an app on a port of its own, beside the one of Ray Serve's proxy."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from starlette.types import ASGIApp


@asynccontextmanager
async def listening(app: ASGIApp, host: str, port: int) -> AsyncIterator[None]:
    """Serves an app until the block ends. Gateways of one node, such as an old one and its successor, share the port.

    Raises:
        OSError: a program has the port that does not share it. A service claims its ports when it starts.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
        serving = asyncio.create_task(server.serve([listener]))
        try:
            yield
        finally:
            server.should_exit = True
            await serving
