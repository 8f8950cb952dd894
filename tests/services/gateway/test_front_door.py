"""Claim: HAProxy listens on the service's port alone, obeys its user alone, and ends with its service.

Requests reach the gateways of their own service alone. When none answers, HAProxy says so in OpenAI's format.
"""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import psutil
import pytest
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from privmix.gateway import front_door
from tests.running import free_port
from tests.support.waiting import until

STARTS_S = 30.0
PARENT = """
import resource, subprocess, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (1024, 1024))  # fewer than HAProxy asks for
subprocess.Popen(sys.argv[1:]).wait()
"""


def configured(folder: Path, host: str, port: int, gateway: int | None) -> Path:
    """Has Ray Serve write its configuration for a gateway, or for a cluster without a route."""
    config = HAProxyConfig(
        http_options=HTTPOptions(host=host, port=port),
        socket_path=str(folder / "admin.sock"),
        server_state_base=str(folder),
        server_state_file=str(folder / "server-state"),
        metrics_socket_path=str(folder / "metrics.sock"),
        stats_port=free_port(),
        metrics_port=free_port(),
    )
    serve = HAProxyApi(config, config_file_path=str(folder / "haproxy.cfg"))
    if gateway is not None:
        own, last = (ServerConfig(name, "127.0.0.1", gateway) for name in ("gateway", "last-resort"))
        backend = BackendConfig("http-privmix", "/", servers=[own], fallback_server=last, app_name="privmix")
        serve.set_backend_configs({backend.name: backend})
    serve._generate_config_file_internal()
    return Path(serve.config_file_path)


@contextmanager
def haproxy(file: Path) -> Iterator[psutil.Process]:
    """Runs HAProxy as Ray Serve does, as the child of a process that the block may kill."""
    program = front_door.ENVIRONMENT["RAY_SERVE_HAPROXY_BINARY_PATH"]
    parent = subprocess.Popen([sys.executable, "-c", PARENT, program, "-db", "-f", str(file)])
    try:
        until((file.parent / "admin.sock").exists, STARTS_S)
        (child,) = psutil.Process(parent.pid).children()
        yield child
    finally:
        parent.kill()
        parent.wait()


class Echo(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"path": self.path, **{name.lower(): value for name, value in self.headers.items()}}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def gateway(host: str) -> Iterator[int]:
    with ThreadingHTTPServer((host, free_port()), Echo) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def test_it_listens_on_the_services_port_and_takes_orders_from_its_user(tmp_path: Path) -> None:
    port = free_port()
    with haproxy(configured(tmp_path, "127.0.0.1", port, gateway=free_port())) as process:
        listens = [each.laddr for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    assert listens == [("127.0.0.1", port)]
    assert stat.S_IMODE((tmp_path / "admin.sock").stat().st_mode) == 0o600


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "0.0.0.0"])
def test_a_request_reaches_a_gateway_of_its_service(tmp_path: Path, host: str) -> None:
    port = free_port()
    with gateway(host) as behind, haproxy(configured(tmp_path, host, port, behind)):
        own = "127.0.0.1" if host == "0.0.0.0" else host
        headers = {"x-privmix-cluster": "another", "upgrade": "h2c", "connection": "upgrade"}
        until(lambda: httpx.get(f"http://{own}:{port}/-/healthz").is_success, STARTS_S)
        seen = httpx.get(f"http://{own}:{port}/v1/models?a=b", headers=headers).json()
    assert seen["path"] == "/v1/models?a=b"
    assert seen["x-privmix-cluster"] == front_door.cluster()
    assert "upgrade" not in seen


def test_a_gateway_refuses_the_requests_of_another_service() -> None:
    app = Starlette(routes=[Route("/", lambda request: PlainTextResponse("a secret"))])
    app.add_middleware(front_door.OwnRequests)
    with TestClient(app) as client:
        assert client.get("/", headers={"x-privmix-cluster": front_door.cluster()}).text == "a secret"
        with front_door.prepared():
            other = front_door.cluster()
        for headers in ({}, {"x-privmix-cluster": other}):
            refused = client.get("/", headers=headers)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "service_unavailable"


@pytest.mark.parametrize("begun", [False, True])
def test_without_a_gateway_clients_are_told_to_come_back(tmp_path: Path, begun: bool) -> None:
    port = free_port()
    with haproxy(configured(tmp_path, "127.0.0.1", port, free_port() if begun else None)):
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/models")
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "5"
    assert answer.json()["error"]["code"] == "service_unavailable"
    assert answer.json()["error"]["type"] == "server_error"


def test_it_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    with haproxy(configured(tmp_path, "127.0.0.1", free_port(), None)) as process:
        os.kill(process.ppid(), signal.SIGKILL)
        assert psutil.wait_procs([process], timeout=STARTS_S)[1] == []


def test_each_service_has_files_of_its_own_that_no_other_user_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_SERVE_ENABLE_HA_PROXY", "0")
    before = dict(os.environ)
    folders = []
    for _ in range(2):
        with front_door.prepared():
            folders.append(Path(os.environ["RAY_SERVE_HAPROXY_SOCKET_PATH"]).parent)
            assert len(os.environ["RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"]) + 60 < 97
            assert stat.S_IMODE(folders[-1].stat().st_mode) == 0o700
            assert os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "0", "an operator's choice"
        assert dict(os.environ) == before
    assert folders[0] != folders[1]
    assert not any(folder.exists() for folder in folders)
