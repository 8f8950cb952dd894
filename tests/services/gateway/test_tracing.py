"""Claim: each request has one span where an exporter is named, with what the access log says and no text; else none."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

TRACE, CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
GIVEN = f"00-{TRACE}-{CALLER}-01"
SERVED = """
import sys
from starlette.applications import Starlette
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.testclient import TestClient
from privmix.gateway.access_log import AccessLog

def answer(request):
    if "Wilhelmina" in request.query_params:
        raise KeyError("Wilhelmina")
    return PlainTextResponse("Wilhelmina")

app = AccessLog(Starlette(routes=[Route("/v1/models", answer)]), answer_id=True)
client = TestClient(app, raise_server_exceptions=False, headers={"x-request-id": "traced"})
"""


def run(script: str, **environment: str) -> str:
    """What a process of its own prints, whose environment says whether there are traces."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    command = [sys.executable, "-c", SERVED + script]
    return subprocess.run(command, env={**inherited, **environment}, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def collector() -> Iterator[tuple[str, list[ExportTraceServiceRequest]]]:
    """The URL of an OpenTelemetry collector, and what it receives: OTLP over HTTP."""
    received: list[ExportTraceServiceRequest] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", received
        server.shutdown()


def exported(collector: tuple[str, list[ExportTraceServiceRequest]], script: str) -> Span:
    """The only span of a script."""
    url, received = collector
    run(script, OTEL_TRACES_EXPORTER="otlp", OTEL_EXPORTER_OTLP_ENDPOINT=url)
    assert "Wilhelmina" not in str(received)
    (resource,) = (resource for request in received for resource in request.resource_spans)
    names = {key.key: key.value.string_value for key in resource.resource.attributes}
    assert names["service.name"] == "privmix"
    assert {name.partition(".")[0] for name in names} <= {"service", "telemetry"}
    (span,) = (span for scope in resource.scope_spans for span in scope.spans)
    assert not (span.events or span.status.message)
    return span


def said(span: Span) -> dict[str, str | int]:
    return {key.key: getattr(key.value, key.value.WhichOneof("value")) for key in span.attributes}


OF_REQUEST = {"http.request.method": "GET", "http.route": "/v1/models", "request_id": "traced"}


def test_a_request_is_a_span_of_its_clients_trace(collector: tuple[str, list[ExportTraceServiceRequest]]) -> None:
    span = exported(collector, f"client.get('/v1/models', headers={{'traceparent': '{GIVEN}'}})")
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, CALLER)
    assert said(span) == {**OF_REQUEST, "http.response.status_code": 200}


@pytest.mark.parametrize("given", ["Wilhelmina", GIVEN[:-3], "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_what_is_no_traceparent_begins_a_trace(
    collector: tuple[str, list[ExportTraceServiceRequest]], given: str
) -> None:
    span = exported(collector, f"client.get('/v1/models', headers={{'traceparent': {given!r}}})")
    assert not span.parent_span_id


def test_an_error_is_told_by_its_type_alone(collector: tuple[str, list[ExportTraceServiceRequest]]) -> None:
    span = exported(collector, "client.get('/v1/models?Wilhelmina=1')")
    assert span.status.code == Status.STATUS_CODE_ERROR
    assert said(span)["error.type"] == "KeyError"


def test_off_there_is_nothing() -> None:
    script = "client.get('/v1/models')\nprint('opentelemetry.sdk.trace' in sys.modules)"
    assert run(script) == run(script, OTEL_TRACES_EXPORTER="none") == "False\n"


def test_an_exporter_that_is_not_there_is_refused() -> None:
    script = """
from privmix.gateway import tracing
try:
    tracing.prepare()
except ValueError as error:
    print(error)
"""
    assert "no exporter 'zipkin'" in run(script, OTEL_TRACES_EXPORTER="zipkin")
