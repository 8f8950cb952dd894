"""Records one OpenTelemetry span for each request, if the environment names an exporter.

`OTEL_TRACES_EXPORTER=otlp` (or `console`) in the environment of the gateways enables it. Other variables of the SDK set
the destination and the sampling: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables.

A span holds what the access log holds, without text and messages of exceptions. There is none below it: how long a step
or a shard takes can reveal how many parts were drawn.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points

from opentelemetry.context import Context
from opentelemetry.trace import INVALID_SPAN, Span, SpanKind, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator


@contextmanager
def request(client: str | None = None) -> Iterator[Span]:
    """Yields the span of a request, which continues the client's trace in the W3C `traceparent`, if there is one."""
    tracer = prepare()
    if tracer is None:
        yield INVALID_SPAN
        return
    context = TraceContextTextMapPropagator().extract({"traceparent": client} if client else {}, Context())
    with tracer.start_as_current_span(
        "request", context, SpanKind.SERVER, record_exception=False, set_status_on_exception=False
    ) as span:
        try:
            yield span
        except Exception as error:
            span.set_status(StatusCode.ERROR)
            span.set_attribute("error.type", type(error).__qualname__)
            raise


@cache
def prepare() -> Tracer | None:
    """Returns this process's tracer, which it creates at the first call; None if traces are not enabled.

    Raises:
        ValueError: the environment names an exporter that is not installed.
    """
    kind = os.environ.get("OTEL_TRACES_EXPORTER", "none")
    if kind == "none":
        return None
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    protocol = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf").partition("/")[0]
    name = f"otlp_proto_{protocol}" if kind == "otlp" else kind
    installed = entry_points(group="opentelemetry_traces_exporter", name=name)
    if not installed:
        raise ValueError(f"OTEL_TRACES_EXPORTER: there is no exporter {name!r}; use otlp, console or none")
    os.environ.setdefault("OTEL_SERVICE_NAME", "privmix")
    provider = TracerProvider()
    provider.add_span_processor(BatchSpanProcessor(installed[name].load()()))
    return provider.get_tracer("privmix")
