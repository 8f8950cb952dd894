"""Claim: nginx with the Ingress's host, path and annotations gives HTTPS, streams at once, and routes `/v1` alone."""

import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import kubernetes_validate
import pytest

from privmix.gateway.settings import ClientSettings
from tests.k8s.containers import unavailable
from tests.k8s.manifests import KUBERNETES, with_components
from tests.running import free_port
from tests.support.waiting import until

pytestmark = pytest.mark.slow

# What ingress-nginx makes of a host, a path of type Prefix and the annotations.
NGINX = """
user root; daemon off; pid {folder}/pid; error_log {folder}/log; events {{ }}
http {{
    access_log off;
    server {{ listen 127.0.0.1:{plain}; server_name {host}; return 308 https://$host$request_uri; }}
    server {{
        listen 127.0.0.1:{port} ssl; server_name {host};
        ssl_certificate {folder}/certificate; ssl_certificate_key {folder}/key;
        location / {{ return 404; }}
        location {path}/ {{ proxy_pass http://127.0.0.1:{backend}; proxy_http_version 1.1; {options} }}
    }}
}}
"""
arrived = threading.Event()


class Backend(BaseHTTPRequestHandler):
    """Sends the length of a body, and the end of its answer once the client has that."""

    def do_POST(self) -> None:
        length = len(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"{length}\n".encode())
        if arrived.wait(60):
            self.wfile.write(b"end\n")


@pytest.fixture
def backend() -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Backend)
    threading.Thread(target=server.serve_forever).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_nginx_routes_as_the_ingress_says(backend: int, tmp_path: Path) -> None:
    if (reason := unavailable()) is not None:
        pytest.skip(reason)
    ingress = with_components("gpu", tmp_path / "k8s", "ingress").one("Ingress")
    kubernetes_validate.validate(ingress, KUBERNETES, strict=True)
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"] == {"name": "privmix-serve-svc", "port": {"number": 8000}}
    noted = {key.rpartition("/")[2]: value for key, value in ingress["metadata"]["annotations"].items()}
    assert noted.pop("force-ssl-redirect") == "true"
    named = {"proxy-body-size": "client_max_body_size"}
    options = " ".join(f"{named.get(key, key.replace('-', '_'))} {value};" for key, value in noted.items())
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={rule['host']}"]
    subprocess.run([*made, "-keyout", tmp_path / "key", "-out", tmp_path / "certificate"], check=True)
    plain, port = free_port(), free_port()
    fields = {"host": rule["host"], "path": path["path"], "backend": backend, "options": options}
    (file := tmp_path / "nginx.conf").write_text(NGINX.format(folder=tmp_path, plain=plain, port=port, **fields))
    with subprocess.Popen(["nginx", "-c", file]) as nginx, httpx.Client(verify=False, trust_env=False) as client:
        try:
            client.headers["host"], secure = rule["host"], f"https://127.0.0.1:{port}"
            until(lambda: (tmp_path / "pid").exists(), 60, lambda: (tmp_path / "log").read_text())
            moved = client.get(f"http://127.0.0.1:{plain}/v1/models")
            assert (moved.status_code, moved.headers["location"]) == (308, f"https://{rule['host']}/v1/models")
            for hidden in ("/health", "/console", "/metrics", "/"):
                assert client.get(secure + hidden).status_code == 404
            largest = bytes(ClientSettings().max_body_bytes)
            assert client.post(f"{secure}/v1/completions", content=largest + b"1").status_code == 413
            with client.stream("POST", f"{secure}/v1/completions", content=largest, timeout=60) as answer:
                lines = answer.iter_lines()
                assert next(lines) == str(len(largest)), "before the backend has sent the rest"
                arrived.set()
                assert next(lines) == "end"
        finally:
            nginx.terminate()
