"""Test metrics, spans and signals of every entry point, and the page that Prometheus scrapes."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse
from django.test import AsyncRequestFactory, RequestFactory, override_settings
from django.utils import timezone
from opentelemetry import metrics, trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client.parser import text_string_to_metric_families
from rest_framework.test import APIRequestFactory
from rest_framework.throttling import BaseThrottle
from rest_framework.views import APIView

from ratelimits import signals, telemetry
from ratelimits.algorithms.limits import FixedWindow
from ratelimits.answers import observing
from ratelimits.decorators import limited
from ratelimits.engine import Limit
from ratelimits.engine.server import breaker
from ratelimits.engine.transport.connection import NotReached
from ratelimits.identity import Identity
from ratelimits.middleware import QuotaMiddleware
from ratelimits.models import Access, Rule
from ratelimits.outbound import WaitTooLong, permits
from ratelimits.quota import checking
from ratelimits.telemetry import prometheus
from ratelimits.telemetry.views import metrics as page
from ratelimits.testing import override_rules
from ratelimits.throttling import AnonRateThrottle, QuotaThrottle
from ratelimits.throttling.by_rates import check_limits
from ratelimits.usage.api.views import UnbilledThrottle
from ratelimits.usage.models import DurabilityGap, QuarantinedBatch

pytestmark = pytest.mark.django_db
BURST: dict[str, Any] = {"name": "burst", "algorithm": "fixed_window", "capacity": 1, "period": 3600, "key_kind": "ip"}
ADA = Identity(address="ip:192.0.2.1")
SPANS, READER = InMemorySpanExporter(), InMemoryMetricReader()
LABELS = ("rule", "outcome", "kind", "le")
PAGE = (Path(__file__).parents[2] / "docs" / "monitoring.md").read_text()


@pytest.fixture(scope="session", autouse=True)
def _sdk() -> None:
    """Install the SDK of OpenTelemetry, as a project does."""
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(SPANS))
    trace.set_tracer_provider(provider)
    metrics.set_meter_provider(MeterProvider([READER]))


@pytest.fixture
def watched() -> Iterator[None]:
    SPANS.clear()
    telemetry.forget()
    names = ["prometheus", "opentelemetry"]
    with override_settings(RATELIMITS={**settings.RATELIMITS, "TELEMETRY": names, "PATHS": ["/anywhere/"]}):
        yield
    assert observing.observers == []


def scraped() -> dict[tuple[str, ...], float]:
    """Return the samples of the page, by name and values of labels in the order of LABELS."""
    text = page(RequestFactory().get("/metrics")).content.decode()
    return {
        (sample.name, *(sample.labels[name] for name in LABELS if name in sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def grown(run: Callable[[], object]) -> dict[tuple[str, ...], float]:
    """Return the counters that have grown while `run` ran, with their growth."""
    before = scraped()
    run()
    telemetry.forget()
    after = scraped()
    return {
        name: value - before.get(name, 0.0)
        for name, value in after.items()
        if value != before.get(name, 0.0) and name[0].endswith("_total")
    }


class Hello(APIView):
    authentication_classes = permission_classes = ()
    throttle_classes: tuple[type[BaseThrottle], ...] = (QuotaThrottle,)

    def get(self, request: Any) -> HttpResponse:
        return HttpResponse("hello")


class Rated(Hello):
    class Throttle(AnonRateThrottle):
        rate = "1/hour"

    throttle_classes = (Throttle,)


class UsageApi(Hello):
    throttle_classes = (UnbilledThrottle,)
    throttle_scope = "*"


@limited()
def plain(request: Any) -> HttpResponse:
    return HttpResponse("hello")


@limited()
async def aplain(request: Any) -> HttpResponse:
    return HttpResponse("hello")


def through_middleware(request: Any) -> Any:
    return QuotaMiddleware(lambda _request: HttpResponse("hello"))(request)


@pytest.mark.usefixtures("watched")
@pytest.mark.parametrize(
    ("view", "factory", "rule"),
    [
        pytest.param(Hello.as_view(), APIRequestFactory(), "burst", id="throttle"),
        pytest.param(Rated.as_view(), APIRequestFactory(), observing.IN_CODE, id="rates"),
        pytest.param(plain, RequestFactory(), "burst", id="decorator"),
        pytest.param(aplain, AsyncRequestFactory(), "burst", id="async decorator"),
        pytest.param(through_middleware, RequestFactory(), "burst", id="middleware"),
        pytest.param(UsageApi.as_view(), APIRequestFactory(), "burst", id="usage API"),
    ],
)
def test_every_entry_point_is_counted_and_traced(view: Any, factory: Any, rule: str) -> None:
    def answer() -> int:
        response = view(factory.get("/anywhere/"))
        status: int = (asyncio.run(response) if asyncio.iscoroutine(response) else response).status_code
        return status

    with override_rules([BURST]):
        counted = grown(lambda: [answer() for _time in range(3)])
    assert counted == {
        ("ratelimits_decisions_total", rule, "admitted"): 1,
        ("ratelimits_decisions_total", rule, "refused"): 2,
    }
    outcomes = [(span.attributes or {})["ratelimits.outcome"] for span in SPANS.get_finished_spans()]
    assert outcomes == ["admitted", "refused", "refused"]


@pytest.mark.usefixtures("watched")
def test_blocks_failures_and_shadow_rules_are_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*arguments: object) -> None:
        raise NotReached("no server")

    with override_rules([{**BURST, "mode": "shadow"}, {**BURST, "name": "wide", "capacity": 99}]):
        counted = grown(lambda: [checking.check(ADA) for _time in range(2)])
        assert counted["ratelimits_shadow_refusals_total", "burst"] == 1
        assert sum(value for name, value in counted.items() if name[-1] == "admitted") == 2
        Access.objects.create(target="192.0.2.1", effect="block")
        assert grown(lambda: checking.check(ADA)) == {("ratelimits_decisions_total", "", "blocked"): 1}
    with override_rules([{**BURST, "on_failure": "allow"}]), monkeypatch.context() as patch:
        patch.setattr(checking, "decide_call", away)
        counted = grown(lambda: [checking.check(Identity(address="ip:192.0.2.2")) for _time in range(5)])
        assert counted == {
            ("ratelimits_decisions_total", "", "unmetered"): 5,
            ("ratelimits_breaker_openings_total",): 1,
        }
        assert scraped()["ratelimits_breaker_open",] == 1
    breaker.succeeded()
    assert scraped()["ratelimits_breaker_open",] == 0


@pytest.mark.usefixtures("watched")
def test_the_page_shows_the_way_to_the_ledger() -> None:
    samples = scraped()
    assert samples["ratelimits_redis_up",] == 1
    assert samples["ratelimits_backlog_batches",] == 0
    assert samples["ratelimits_gaps", "restart"] == 0
    assert samples["ratelimits_unmetered_requests_day",] == 0


@pytest.mark.usefixtures("watched")
def test_a_quarantined_batch_is_counted_until_a_person_resolves_it() -> None:
    QuarantinedBatch.objects.create(shard=1, name="a:1", content="1")
    QuarantinedBatch.objects.create(shard=1, name="a:2", content="2", resolved_at=timezone.now())
    telemetry.forget()
    assert scraped()["ratelimits_quarantined_batches",] == 1


@pytest.mark.usefixtures("watched")
def test_a_gap_is_counted_until_its_batches_have_come() -> None:
    for event, recovered in (("a", None), ("b", timezone.now())):
        DurabilityGap.objects.create(event=event, kind="missing", shard=1, since=1, until=2, recovered_at=recovered)
    telemetry.forget()
    assert scraped()["ratelimits_gaps", "missing"] == 1


@pytest.mark.usefixtures("watched")
def test_opentelemetry_has_the_same_metrics() -> None:
    with override_rules([BURST]):
        checking.check(ADA)
    data: Any = READER.get_metrics_data()
    [scope] = data.resource_metrics[0].scope_metrics
    names = {metric.name for metric in scope.metrics}
    assert {"ratelimits.decisions", "ratelimits.decision.duration", "ratelimits.redis_up", "ratelimits.gaps"} <= names


def test_names_of_rules_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "MAX_RULES", 1)
    monkeypatch.setattr(prometheus, "_rules", set())
    assert [prometheus._label(rule) for rule in ("a", "b", "a", "")] == ["a", "other", "a", ""]


def test_switched_off_nothing_observes_and_the_page_says_what_to_set() -> None:
    assert observing.observers == []
    with pytest.raises(ImproperlyConfigured, match="TELEMETRY"):
        page(RequestFactory().get("/metrics"))


@pytest.mark.usefixtures("watched")
def test_the_page_on_monitoring_names_every_metric_and_only_these() -> None:
    with override_rules([{**BURST, "mode": "shadow", "capacity": 0}]):
        checking.check(ADA)
    names = {name[0] for name in scraped() if not name[0].endswith("_created")}
    shown = {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}
    documented = set(re.findall(r"^\| `(ratelimits_\w+)`", PAGE, re.MULTILINE))
    assert documented - shown <= {"ratelimits_watermark_age_seconds"}  # needs a ledger
    assert shown - documented == set()


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((Path(__file__).parents[2] / "docs" / "grafana.json").read_text())
    asked = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"ratelimits_\w+", target["expr"])
    }
    assert asked == set(re.findall(r"^\| `(ratelimits_\w+)`", PAGE, re.MULTILINE))
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    squares = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(squares) == len(set(squares)), "no panel covers another one"
    named = {item["matcher"]["options"] for item in dashboard["panels"][0]["fieldConfig"]["overrides"]}
    assert named <= set(re.findall(r"`(\w+)`", PAGE)), "the outcomes that have a colour of their own"


class TestSignals:
    @pytest.fixture
    def received(self) -> Iterator[list[dict[str, Any]]]:
        received: list[dict[str, Any]] = []

        def receive(**kwargs: Any) -> None:
            received.append(kwargs)
            raise RuntimeError("a receiver's error changes nothing")

        sent = (signals.request_refused, signals.rules_changed, signals.period_closed, signals.breaker_switched)
        for signal in sent:
            signal.connect(receive)
        yield received
        for signal in sent:
            signal.disconnect(receive)

    def test_each_refusal_is_sent(self, check: Any, received: list[dict[str, Any]]) -> None:
        with override_rules([BURST]):
            assert [check(ADA, "search", "GET").allowed for _time in range(3)] == [True, False, False]
        assert [(one["identity"], one["scope"], one["method"]) for one in received] == [(ADA, "search", "GET")] * 2
        assert received[0]["answer"].binding.name == "burst"

    def test_refusals_by_rates_in_code_are_sent(self, received: list[dict[str, Any]]) -> None:
        limits = [Limit("ip:192.0.2.1", FixedWindow(1, 3600))]  # type: ignore[arg-type]
        assert [check_limits(limits).allowed for _time in range(2)] == [True, False]
        assert [one["identity"] for one in received] == [None]

    @pytest.mark.django_db(transaction=True)
    def test_an_edit_is_sent_after_its_commit(self, received: list[dict[str, Any]]) -> None:
        Rule.objects.create(**BURST)
        Rule.objects.update(capacity=2)
        versions = [one["version"] for one in received if one["signal"] is signals.rules_changed]
        assert versions == [versions[0], versions[0] + 1]

    def test_a_server_that_fails_and_answers_again_is_sent(self, received: list[dict[str, Any]]) -> None:
        for _failure in range(4):
            breaker.failed()
        breaker.succeeded()
        breaker.succeeded()
        assert [one["is_open"] for one in received] == [True, False]


@pytest.mark.usefixtures("watched")
def test_outbound_calls_are_counted_sync_and_async() -> None:
    def call() -> None:
        with permits("mailer-api", max_wait=0):
            pass

    async def acall() -> None:
        async with permits("mailer-api", max_wait=0):
            pass

    def both() -> None:
        with override_rules([{**BURST, "scope": "mailer-api"}]):
            call()
            with pytest.raises(WaitTooLong):
                asyncio.run(acall())

    counted = {("ratelimits_decisions_total", "burst", outcome): 1.0 for outcome in ("admitted", "refused")}
    assert grown(both) == counted
    assert {span.attributes["ratelimits.scope"] for span in SPANS.get_finished_spans() if span.attributes} == {
        "mailer-api"
    }


@pytest.mark.usefixtures("watched")
def test_an_outbound_call_that_nothing_limits_is_not_counted() -> None:
    def free() -> None:
        with permits("nobody-limits-this"):
            pass

    assert grown(free) == {}
