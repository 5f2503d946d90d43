"""Metrics for Prometheus, made with the package `prometheus_client`. docs/monitoring.md explains each metric."""

from __future__ import annotations

import os
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from ratelimits import telemetry
from ratelimits.answers.observing import Observation

#: Upper bounds of the histogram's buckets in seconds: a decision usually takes less than a millisecond.
_BUCKETS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)
#: Maximum number of rules with a counter of their own. Further rules are counted as OTHER.
MAX_RULES = 500
OTHER = "other"

# Do not use the client's default registry: a project that serves both registries would have each metric twice.
registry = CollectorRegistry()
_decisions = Counter(
    "ratelimits_decisions", "Decisions, by the binding rule and the outcome", ["rule", "outcome"], registry=registry
)
_shadow = Counter(
    "ratelimits_shadow_refusals", "Requests that a rule in shadow mode would have refused", ["rule"], registry=registry
)
_seconds = Histogram(
    "ratelimits_decision_seconds", "Time of a decision, without waiting", buckets=_BUCKETS, registry=registry
)
_breaker = Gauge(
    "ratelimits_breaker_open",
    "Processes that do not ask Redis now, because it failed several times",
    multiprocess_mode="livesum",
    registry=registry,
)
_openings = Counter("ratelimits_breaker_openings", "How often a process stopped asking Redis", registry=registry)
_breaker.set(0)
#: The names of the rules that have their own counter.
_rules: set[str] = set()


def observe(observation: Observation) -> None:
    """Count one decision."""
    _decisions.labels(_label(observation.rule), observation.outcome.value).inc()
    _seconds.observe((observation.ended - observation.started) / 1e9)  # from nanoseconds
    for rule in observation.shadow:
        _shadow.labels(_label(rule)).inc()


def _label(rule: str) -> str:
    """Return the label under which a rule is counted: its name, or OTHER if MAX_RULES other rules have a counter.

    If no rule decided, the name and the label are "".
    """
    if rule in _rules or not rule:
        return rule
    if len(_rules) >= MAX_RULES:
        return OTHER
    _rules.add(rule)
    return rule


def breaker_changed(is_open: bool) -> None:
    """Note that this process stops asking Redis, or asks it again."""
    _breaker.set(is_open)
    if is_open:
        _openings.inc()


class _State(Collector):
    """The numbers that do not come from decisions. They are read when Prometheus reads the page."""

    def collect(self) -> Iterator[Metric]:
        families: dict[str, GaugeMetricFamily] = {}
        for reading in telemetry.readings():
            name = f"ratelimits_{reading.name}"
            labels = [label for label, _value in reading.labels]
            family = families.setdefault(name, GaugeMetricFamily(name, reading.meaning, labels=labels))
            family.add_metric([value for _label, value in reading.labels], reading.value)
        yield from families.values()


def exposition() -> bytes:
    """Return all metrics in Prometheus's text format.

    If the environment variable PROMETHEUS_MULTIPROC_DIR is set, add up the metrics of all processes. A web server with
    several processes needs this variable.
    """
    decision_registry = registry
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        decision_registry = CollectorRegistry()
        MultiProcessCollector(decision_registry)  # type: ignore[no-untyped-call]
    state_registry = CollectorRegistry(auto_describe=False)
    state_registry.register(_State())
    return generate_latest(decision_registry) + generate_latest(state_registry)
