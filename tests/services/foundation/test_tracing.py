"""Claim: traces are off unless asked for, whole when they are on, and silent about text and draw."""

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args

import openai
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from privmix.foundation import tracing
from tests.ensembles import write_ensemble
from tests.running import configure, running

GIVEN = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TRACE, CALLER = GIVEN.split("-")[1:3]


def run(script: str, **environment: str) -> str:
    """What a process of its own prints, whose traces the environment turns on."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    return subprocess.run(
        [sys.executable, "-c", f"from privmix.foundation import tracing\n{script}"],
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def exported(script: str) -> dict[str, dict[str, Any]]:
    """The spans of a script, by name."""
    text, spans = run(script, OTEL_TRACES_EXPORTER="console").strip(), []
    while text:
        span, end = json.JSONDecoder().raw_decode(text)
        spans.append(span)
        text = text[end:].lstrip()
    return {span["name"]: span for span in spans}


NESTED = f"""
with tracing.request("request", "{GIVEN}"):
    with tracing.span("step"):
        handed = tracing.traceparent()
with tracing.span("shard", handed, links=["{GIVEN}"]) as span:
    tracing.set_attributes(span, {{"privmix.sequences": 3}})
"""


def test_a_trace_goes_on_where_its_traceparent_goes() -> None:
    spans = exported(NESTED)
    assert {span["context"]["trace_id"] for span in spans.values()} == {f"0x{TRACE}"}
    assert spans["request"]["parent_id"] == f"0x{CALLER}"
    assert spans["step"]["parent_id"] == spans["request"]["context"]["span_id"]
    assert spans["shard"]["parent_id"] == spans["step"]["context"]["span_id"]
    assert spans["shard"]["attributes"] == {"privmix.sequences": 3}
    assert [link["context"]["span_id"] for link in spans["shard"]["links"]] == [f"0x{CALLER}"]
    assert spans["shard"]["resource"]["attributes"]["service.name"] == "privmix"


def test_a_trace_that_is_not_sampled_is_handed_to_nobody() -> None:
    script = "with tracing.request('request'):\n    print(tracing.traceparent())"
    assert run(script, OTEL_TRACES_EXPORTER="console", OTEL_TRACES_SAMPLER="always_off") == "None\n"


@pytest.mark.parametrize("given", ["Wilhelmina", GIVEN[:-3], "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_what_is_no_traceparent_begins_a_trace(given: str) -> None:
    (span,) = exported(f"with tracing.request('request', {given!r}): pass").values()
    assert span["parent_id"] is None
    assert "Wilhelmina" not in json.dumps(span)


def test_an_error_is_told_by_its_type_alone() -> None:
    script = """
try:
    with tracing.request("request"):
        raise KeyError("Wilhelmina")
except KeyError:
    pass
"""
    (span,) = exported(script).values()
    assert span["attributes"] == {"error.type": "KeyError"}
    assert span["status"] == {"status_code": "ERROR"}
    assert span["events"] == []


def test_off_there_is_nothing() -> None:
    script = f"""
import sys
with tracing.request("request", "{GIVEN}"), tracing.span("step") as span:
    print(tracing.traceparent(), span.is_recording(), "opentelemetry.sdk.trace" in sys.modules)
"""
    assert run(script) == run(script, OTEL_TRACES_EXPORTER="none") == "None False False\n"


def test_an_exporter_that_is_not_there_is_refused() -> None:
    script = "try:\n    tracing.prepare()\nexcept ValueError as error:\n    print(error)"
    assert "no exporter 'zipkin'" in run(script, OTEL_TRACES_EXPORTER="zipkin")


class Collector:
    """An OpenTelemetry collector as far as a test needs one: OTLP over HTTP, kept in memory."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        requests = self.requests

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    def spans(self) -> list[Span]:
        resources = [resource for request in list(self.requests) for resource in request.resource_spans]
        return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]

    def spans_of(self, trace: str) -> list[Span]:
        return [span for span in self.spans() if span.trace_id.hex() == trace]


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """What is started while this lives sends its traces here."""
    collector = Collector()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server.server_port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
    threading.Thread(target=collector.server.serve_forever, daemon=True).start()
    yield collector
    collector.server.shutdown()
    collector.server.server_close()


PARTS, TOKENS = 3, 6
SMALL: dict[str, dict[str, Any]] = {
    "privacy": {"q": 0.5, "epsilon": 8.0, "delta": 1e-5, "tokens": 1000},
    "engine": {"kind": "transformers", "context_length": 256},
    "shards": {"parts_per_shard": 1, "num_cpus": 0},
    "http": {"max_tokens": 64},
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_path_of_a_token_through_a_running_service(collector: Collector, tmp_path: Path) -> None:
    ensemble = write_ensemble(tmp_path / "ensemble", PARTS)
    with running(configure(tmp_path, ensemble, **SMALL)) as service:
        client = openai.OpenAI(base_url=f"{service.base_url}/v1", api_key="none", max_retries=0, timeout=300)
        answer = client.completions.create(
            model="privmix",
            prompt="Wilhelmina called because",
            max_tokens=TOKENS,
            extra_headers={"traceparent": GIVEN, "x-request-id": "traced"},
        )
        assert answer.usage is not None
        released = answer.usage.completion_tokens
        # For the request one span, a lease at least, and for each token two, one of the first shard, two of each other.
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and len(collector.spans_of(TRACE)) < 2 + (1 + 2 * PARTS) * released:
            time.sleep(0.2)
    assert "Wilhelmina" not in str(collector.requests)
    assert not answer.choices[0].text or answer.choices[0].text not in str(collector.requests)

    spans = collector.spans_of(TRACE)
    names = {span.span_id: span.name for span in spans}
    (request,) = (span for span in spans if span.name == "request")
    assert request.parent_span_id.hex() == CALLER
    above = Counter((span.name, names[span.parent_span_id]) for span in spans if span is not request)
    assert above.pop(("budget.lease", "step")) >= 1
    # Shards with a part each, of which a token draws some: every shard computes rows, so the draw shows nowhere.
    steps = {("step", "request"): released, ("ask", "step"): released}
    assert above == {**steps, ("shard.reduce", "ask"): PARTS * released, ("shard.keep", "ask"): (PARTS - 1) * released}

    assert said(request) == {
        "http.request.method": "POST",
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
        "privmix.completion_tokens": released,
        "request_id": "traced",
    }
    assert all(said(span) == {"privmix.sequences": 1} for span in spans if span.name == "step")
    for span in collector.spans():
        assert said(span).keys() <= set(get_args(tracing.Attribute))
        assert not (span.events or span.status.message or span.trace_state)
    resources = [resource for request in collector.requests for resource in request.resource_spans]
    known = {key.key.partition(".")[0] for resource in resources for key in resource.resource.attributes}
    assert known <= {"service", "telemetry"}


def said(span: Span) -> dict[str, str | int]:
    return {key.key: getattr(key.value, key.value.WhichOneof("value")) for key in span.attributes}
