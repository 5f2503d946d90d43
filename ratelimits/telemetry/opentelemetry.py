"""Metrics and spans for OpenTelemetry. This module needs only the API package: a project chooses the SDK.

docs/monitoring.md explains each metric.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from opentelemetry import metrics, trace
from opentelemetry.metrics import CallbackOptions
from opentelemetry.metrics import Observation as Measured
from opentelemetry.trace import SpanKind

from ratelimits import telemetry
from ratelimits.answers.observing import Observation, RequestOutcome

_NAME = "ratelimits"
_otel_meter = metrics.get_meter(_NAME)
_tracer = trace.get_tracer(_NAME)
_decisions = _otel_meter.create_counter("ratelimits.decisions", "{decision}", "Decisions, by binding rule and outcome")
_shadow = _otel_meter.create_counter("ratelimits.shadow_refusals", "{request}", "Refusals by rules in shadow mode")
_seconds = _otel_meter.create_histogram("ratelimits.decision.duration", "s", "Time of a decision, without waiting")
_breaker = _otel_meter.create_up_down_counter("ratelimits.breaker.open", "{process}", "Processes that do not ask Redis")
#: The metrics that are read when the SDK collects metrics, with their units in the notation UCUM ("By" means bytes).
_GAUGES = {
    "redis_up": "1",
    "redis_memory_bytes": "By",
    "redis_memory_share": "1",
    "backlog_batches": "{batch}",
    "watermark_age_seconds": "s",
    "quarantined_batches": "{batch}",
    "full_totals": "{total}",
    "gaps": "{gap}",
    "unmetered_requests_day": "{request}",
    "unanswered_requests_day": "{request}",
}


def _reader(name: str) -> Callable[[CallbackOptions], Iterable[Measured]]:
    def read(options: CallbackOptions) -> Iterable[Measured]:
        return [
            Measured(reading.value, dict(reading.labels)) for reading in telemetry.readings() if reading.name == name
        ]

    return read


for _metric, _unit in _GAUGES.items():
    _otel_meter.create_observable_gauge(f"ratelimits.{_metric}", [_reader(_metric)], _unit)


def observe(observation: Observation) -> None:
    """Count one decision, and write its span."""
    attributes = {"ratelimits.rule": observation.rule, "ratelimits.outcome": observation.outcome.value}
    _decisions.add(1, attributes)
    _seconds.record((observation.ended - observation.started) / 1e9, attributes)  # from nanoseconds
    for rule in observation.shadow:
        _shadow.add(1, {"ratelimits.rule": rule})
    # The span is written when the decision is known. Spans need times since 1970, so convert the monotonic times.
    offset = time.time_ns() - time.perf_counter_ns()
    span = _tracer.start_span(
        "ratelimits.check",
        kind=SpanKind.CLIENT,
        attributes={**attributes, "ratelimits.scope": observation.scope},
        start_time=observation.started + offset,
    )
    if observation.outcome in (RequestOutcome.UNMETERED, RequestOutcome.UNAVAILABLE):
        span.set_status(trace.StatusCode.ERROR, "Redis made no decision")
    span.end(observation.ended + offset)


def breaker_changed(is_open: bool) -> None:
    """Note that this process stops asking Redis, or asks it again."""
    _breaker.add(1 if is_open else -1)
