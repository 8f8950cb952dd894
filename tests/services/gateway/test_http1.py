"""Claim: the running service answers requests as clients of all ages send them, or refuses them."""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from typing import Any

import pytest

from tests.running import RunningService

COMPLETIONS = "/v1/completions"
CHATS = "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": "privmix", "prompt": "The patient called because", "max_tokens": 6},
    CHATS: {"model": "privmix", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6},
    "/tokenize": {"model": "privmix", "prompt": "Hello"},
}
REQUESTS = [
    *(("GET", path, b"") for path in ("/livez", "/readyz", "/health", "/v1/models", "/v1/privacy", "/docs")),
    *(("POST", path, json.dumps(body).encode()) for path, body in BODIES.items()),
    *(("POST", path, json.dumps(BODIES[path] | {"stream": True}).encode()) for path in (COMPLETIONS, CHATS)),
]
BODY = json.dumps(BODIES[COMPLETIONS]).encode()
H2C = (
    "Connection: Upgrade, HTTP2-Settings",
    "Upgrade: h2c",
    "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
)
WEBSOCKET = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: aGVsbG8gaGVsbG8gaGVsbA==",
)
CHUNKED = "Transfer-Encoding: chunked"


def head(method: str, target: str, *headers: str, length: int | None = None, version: str = "1.1") -> bytes:
    lines = [f"{method} {target} HTTP/{version}", "Host: localhost", "Content-Type: application/json", *headers]
    if length is not None:
        lines.append(f"Content-Length: {length}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


def chunks(body: bytes) -> bytes:
    """Returns a body in chunks, with an extension and a trailer."""
    pieces = [body[at : at + 20] for at in range(0, len(body), 20)]
    return b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\nx-sum: 1\r\n\r\n"


@contextmanager
def connected(service: RunningService) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", int(service.base_url.rpartition(":")[2])), timeout=60) as connection:
        yield connection


def answer(connection: socket.socket, method: str = "POST") -> HTTPResponse:
    response = HTTPResponse(connection, method=method)
    response.begin()
    return response


def check(answered: bytes, body: bytes, path: str) -> None:
    """Checks that an answer to `body` is whole and holds nothing else."""
    if b"stream" in body:
        *events, last = answered.decode().removesuffix("\n\n").split("\n\n")
        assert all(json.loads(event.removeprefix("data: "))["choices"] for event in events)
        assert len(events) >= 2
        assert last == "data: [DONE]"
    elif path == "/docs":
        assert answered.rstrip().endswith(b"</html>")
    else:
        assert "error" not in json.loads(answered)


@pytest.mark.parametrize("connection", ["close", "keep-alive"])
@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_a_client_of_http_1_0_gets_no_chunks(
    service: RunningService, method: str, path: str, body: bytes, connection: str
) -> None:
    with connected(service) as client:
        client.sendall(head(method, path, f"Connection: {connection}", length=len(body), version="1.0") + body)
        response = answer(client, method)
        assert response.status == 200
        assert response.headers["transfer-encoding"] is None
        check(response.read(), body, path)
        if connection == "close" or response.headers["content-length"] is None:
            assert client.recv(1) == b"", "the end of the connection is that of the answer"
        else:
            client.sendall(head("GET", "/livez", version="1.0"))
            assert answer(client).status == 200, "the connection stays"


@pytest.mark.parametrize(
    ("sent", "upgrade"), [("at once", H2C), ("later", H2C), ("in chunks", H2C), ("at once", WEBSOCKET)]
)
@pytest.mark.parametrize(("method", "path", "body"), REQUESTS)
def test_a_client_that_offers_another_protocol_is_answered_in_this_one(
    service: RunningService, method: str, path: str, body: bytes, sent: str, upgrade: tuple[str, ...]
) -> None:
    with connected(service) as client:
        if sent == "in chunks":
            client.sendall(head(method, path, CHUNKED, *upgrade) + chunks(body))
        else:
            client.sendall(head(method, path, *upgrade, length=len(body)))
            time.sleep(0.1 if sent == "later" else 0)
            client.sendall(body)
        response = answer(client)
        assert (response.status, response.version) == (200, 11)
        assert (response.headers.get_content_type() == "text/event-stream") == (b"stream" in body)
        check(response.read(), body, path)
        client.sendall(head("GET", "/livez"))
        assert answer(client).status == 200, "the connection stays"


def test_a_body_that_waits_for_its_permission_gets_it(service: RunningService) -> None:
    with connected(service) as client:
        client.sendall(head("POST", COMPLETIONS, "Expect: 100-continue", length=len(BODY)))
        assert client.recv(65536) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(BODY)
        assert answer(client).status == 200


def test_the_target_of_a_request_to_a_proxy_is_answered(service: RunningService) -> None:
    with connected(service) as client:
        client.sendall(head("POST", f"http://localhost{COMPLETIONS}?a=b", "X-Request-Id: own", length=len(BODY)) + BODY)
        response = answer(client)
        assert (response.status, response.headers["x-request-id"]) == (200, "own")
        check(response.read(), BODY, COMPLETIONS)
        client.sendall(head("OPTIONS", "*"))
        response = answer(client)
        assert response.status == 404
        assert json.loads(response.read())["error"]["code"] == "route_not_found"


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/health", "/v1/models"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_head_has_no_body(service: RunningService, path: str, version: str) -> None:
    with connected(service) as client:
        client.sendall(head("HEAD", path, "Connection: close", version=version))
        whole = b"".join(iter(lambda: client.recv(65536), b""))
    assert whole.startswith(b"HTTP/1.1 200 ")
    assert whole.partition(b"\r\n\r\n")[2] == b""


@pytest.mark.parametrize(
    "sent",
    [
        head("POST", COMPLETIONS, "Content-Length: 5", length=len(BODY)) + BODY,
        head("POST", COMPLETIONS, CHUNKED) + b"many\r\n" + BODY,
        head("POST", COMPLETIONS, "Transfer-Encoding: gzip, chunked") + chunks(BODY),
        b"GET /livez HTTP/1.1\r\nConnection: close\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
)
def test_what_is_not_http_is_refused(service: RunningService, sent: bytes) -> None:
    with connected(service) as client:
        client.sendall(sent)
        response = answer(client)
        assert response.status == (422 if b"gzip" in sent else 400)
        response.read()
        assert client.recv(1) == b""
