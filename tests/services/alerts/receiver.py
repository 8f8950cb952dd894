"""Implements a webhook receiver for tests: a real HTTP server that records its requests."""

import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Receiver:
    """Records requests. `statuses` holds the status codes of its next responses; after them it responds 200.

    It answers 400 to alerts whose text is in `refuses`, and counts them in `refusals`.
    """

    url: str = ""
    statuses: list[int] = field(default_factory=list)
    refuses: set[str] = field(default_factory=set)
    refusals: int = 0
    received: list[tuple[Mapping[str, str], str]] = field(default_factory=list)

    @property
    def alerts(self) -> list[dict[str, Any]]:
        return [json.loads(body) for _, body in self.received]

    def events(self) -> list[tuple[str, str, float | None]]:
        return [(alert["event"], alert["status"], alert.get("threshold")) for alert in self.alerts]

    def wait_for(self, count: int, seconds: float = 30) -> list[dict[str, Any]]:
        """Waits for `count` alerts and returns the first `count`."""
        deadline = time.monotonic() + seconds
        while len(self.received) < count:
            assert time.monotonic() < deadline, f"{len(self.received)} of {count} alerts arrived: {self.events()}"
            time.sleep(0.02)
        return self.alerts[:count]


@contextmanager
def receiving() -> Iterator[Receiver]:
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"])).decode()
            status = receiver.statuses.pop(0) if receiver.statuses else 200
            if json.loads(body)["text"] in receiver.refuses:
                receiver.refusals += 1
                status = 400
            # Recorded before the response, because the sender continues as soon as it has the response.
            if status == 200:
                receiver.received.append(({name.lower(): value for name, value in self.headers.items()}, body))
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver.url = f"http://127.0.0.1:{server.server_address[1]}/hook"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield receiver
    finally:
        server.shutdown()
        server.server_close()
