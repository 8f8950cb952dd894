"""OpenTelemetry traces of a token's path through the processes; off unless the environment names an exporter.

`OTEL_TRACES_EXPORTER=otlp` (or `console`) in the environment of every process turns them on; the SDK's other variables
say where to and how many: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables.

    with tracing.request("request", header):          # in the process that a client reaches
        actor.work.remote(tracing.traceparent())      # and in that actor:
    with tracing.span("work", traceparent):

A span holds `Attribute`s and its times, and nothing else: no text, no exception's message. Times tell what a log of
steps would: how many parts were drawn. So traces, as the measured losses, are for the operator.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Literal

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Link, Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

Attribute = Literal[
    "error.type",
    "http.request.method",
    "http.response.status_code",
    "http.route",
    "privmix.completion_tokens",
    "privmix.sequences",
    "privmix.tokens",
    "request_id",
]
"""Everything that a span may say. Nothing of this depends on the private text or on the draw."""

Attributes = Mapping[Attribute, str | int]

_HEADER = "traceparent"
_propagator = TraceContextTextMapPropagator()


def request(name: str, given: str | None = None) -> AbstractContextManager[Span]:
    """The first span of a trace; or of this service's part in the trace that the client gave as `traceparent`."""
    return _started(name, _context(given), SpanKind.SERVER)


def span(name: str, within: str | None = None, links: Sequence[str] = ()) -> AbstractContextManager[Span]:
    """A part of the trace that `within` names, or of the current one; nothing where there is no trace.

    Args:
        links: the traceparents of other traces that this is a part of too.
    """
    if within is None and not trace.get_current_span().is_recording():
        return nullcontext(INVALID_SPAN)
    context = None if within is None else _context(within)
    return _started(name, context, SpanKind.INTERNAL, [Link(_span_context(link)) for link in links])


def traceparent() -> str | None:
    """The current span, as W3C's trace context writes it, for another process to continue; None where none is kept."""
    if not trace.get_current_span().is_recording():
        return None
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier[_HEADER]


def say(current: Span, attributes: Attributes) -> None:
    """Add what became known while the span lasted."""
    for name, value in attributes.items():
        current.set_attribute(name, value)


def prepare() -> None:
    """Make this process's tracer, if there is to be one, before the first request needs it.

    Raises:
        ValueError: the environment names an exporter that is not installed.
    """
    _tracer()


def _started(
    name: str, context: Context | None, kind: SpanKind, links: Sequence[Link] = ()
) -> AbstractContextManager[Span]:
    tracer = _tracer()
    return _recorded(tracer, name, context, kind, links) if tracer else nullcontext(INVALID_SPAN)


@contextmanager
def _recorded(
    tracer: Tracer, name: str, context: Context | None, kind: SpanKind, links: Sequence[Link]
) -> Iterator[Span]:
    with tracer.start_as_current_span(
        name, context, kind, links=links, record_exception=False, set_status_on_exception=False
    ) as current:
        try:
            yield current
        except Exception as error:
            current.set_status(StatusCode.ERROR)
            say(current, {"error.type": type(error).__qualname__})
            raise


def _context(given: str | None) -> Context:
    return _propagator.extract({_HEADER: given} if given else {}, Context())


def _span_context(given: str) -> trace.SpanContext:
    return trace.get_current_span(_context(given)).get_span_context()


@cache
def _tracer() -> Tracer | None:
    named = os.environ.get("OTEL_TRACES_EXPORTER", "none")
    if named == "none":
        return None
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    os.environ.setdefault("OTEL_SERVICE_NAME", "privmix")
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(_exporter(named)))
    return provider.get_tracer("privmix")


def _exporter(named: str) -> "SpanExporter":
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf").partition("/")[0]
    name = f"otlp_proto_{protocol}" if named == "otlp" else named
    found = entry_points(group="opentelemetry_traces_exporter", name=name)
    if not found:
        raise ValueError(f"OTEL_TRACES_EXPORTER: there is no exporter {name!r}; otlp, console and none are there")
    exporter: SpanExporter = found[name].load()()
    return exporter
