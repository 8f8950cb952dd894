"""Records OpenTelemetry traces of a token's path through the processes, if the environment names an exporter.

`OTEL_TRACES_EXPORTER=otlp` (or `console`) in the environment of every process enables them. Other variables of the SDK
set the destination and the sampling: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables.

    with tracing.request("request", header):          # in the process that serves the client
        actor.work.remote(tracing.traceparent())      # and in that actor:
    with tracing.span("work", traceparent):

A span contains only `Attribute`s and times, without text and messages of exceptions. Times can reveal how many parts
were drawn. So traces are for the operator only, like measured losses.
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
"""The names of all attributes. None depends on the private text or on the draw."""

Attributes = Mapping[Attribute, str | int]

_HEADER = "traceparent"
_propagator = TraceContextTextMapPropagator()


def request(name: str, client: str | None = None) -> AbstractContextManager[Span]:
    """Starts the first span of a trace, or of this service's part of the trace in the client's `traceparent`."""
    return _started(name, _context(client), SpanKind.SERVER)


def span(name: str, within: str | None = None, links: Sequence[str] = ()) -> AbstractContextManager[Span]:
    """Starts a span of a trace. Does nothing if there is no trace.

    Args:
        within: the traceparent of the trace; None: the current trace.
        links: the traceparents of other traces to which the span belongs too.
    """
    if within is None and not trace.get_current_span().is_recording():
        return nullcontext(INVALID_SPAN)
    context = None if within is None else _context(within)
    return _started(name, context, SpanKind.INTERNAL, [Link(_span_context(link)) for link in links])


def traceparent() -> str | None:
    """Returns the current span in the format of W3C's trace context, for another process; None if there is none."""
    if not trace.get_current_span().is_recording():
        return None
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier[_HEADER]


def set_attributes(current: Span, attributes: Attributes) -> None:
    for name, value in attributes.items():
        current.set_attribute(name, value)


def prepare() -> None:
    """Creates this process's tracer, if traces are enabled, before the first request needs it.

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
            set_attributes(current, {"error.type": type(error).__qualname__})
            raise


def _context(parent: str | None) -> Context:
    return _propagator.extract({_HEADER: parent} if parent else {}, Context())


def _span_context(parent: str) -> trace.SpanContext:
    return trace.get_current_span(_context(parent)).get_span_context()


@cache
def _tracer() -> Tracer | None:
    exporter = os.environ.get("OTEL_TRACES_EXPORTER", "none")
    if exporter == "none":
        return None
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    os.environ.setdefault("OTEL_SERVICE_NAME", "privmix")
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(_exporter(exporter)))
    return provider.get_tracer("privmix")


def _exporter(kind: str) -> "SpanExporter":
    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf").partition("/")[0]
    name = f"otlp_proto_{protocol}" if kind == "otlp" else kind
    installed = entry_points(group="opentelemetry_traces_exporter", name=name)
    if not installed:
        raise ValueError(f"OTEL_TRACES_EXPORTER: there is no exporter {name!r}; use otlp, console or none")
    exporter: SpanExporter = installed[name].load()()
    return exporter
