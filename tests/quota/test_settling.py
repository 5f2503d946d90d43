"""Test that requests which reserve an estimate, and settle their true costs, keep the documented bound and the bill."""

from __future__ import annotations

import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.db.models import Sum
from django.test import RequestFactory
from rest_framework.response import Response
from rest_framework.views import APIView

from ratelimits.identity import Identity
from ratelimits.quota import checking, receipts
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.ledger.tally import tally
from ratelimits.usage.models import PeriodUsage
from tests.support.entry_points import begin_afresh
from tests.support.rows import rule
from tests.support.snippets import snippet

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]

CALLER = Identity(user="user:1", account="account:acme")
ESTIMATE = 50


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_afresh(monkeypatch)


@pytest.mark.parametrize("most", [ESTIMATE, 4 * ESTIMATE], ids=["estimates are enough", "estimates are too low"])
@pytest.mark.parametrize("algorithm", ["fixed_window", "token_bucket"])
def test_many_at_once_stay_in_the_bound_and_the_ledger_has_their_true_costs(algorithm: str, most: int) -> None:
    requests = 1000
    capacity = requests * ESTIMATE // 3
    numbers: dict[str, Any] = {"rate": 1} if algorithm == "token_bucket" else {"window_start": "first_hit"}
    limit = rule("tokens", algorithm, meter="tokens", capacity=capacity, period=86_400, bills=True, **numbers)
    drawn = random.Random(20261)
    costs = [drawn.randint(0, most) for _ in range(requests)]
    admitted: list[int] = []
    begin = threading.Barrier(16)

    def work(mine: list[int]) -> None:
        begin.wait()
        running = []
        for cost in mine:
            answer = checking.check(CALLER, "*", "POST", {"tokens": ESTIMATE})
            if answer.allowed:
                running.append((SimpleNamespace(quota=answer), cost))
            # Some requests end while others begin.
            if len(running) > 3:
                end(*running.pop(0))
        for request, cost in running:
            end(request, cost)

    def end(request: Any, cost: int) -> None:
        receipts.settle(request, {"tokens": cost})
        admitted.append(cost)

    threads = [threading.Thread(target=work, args=(costs[number::16],)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    used, excess = sum(admitted), sum(max(cost - ESTIMATE, 0) for cost in admitted)
    # At most four requests of each thread run at the same time.
    at_once = 16 * 4 * (most - ESTIMATE)
    assert used <= capacity + min(excess, at_once)
    assert len(admitted) < requests
    seal()
    drain()
    tally()
    totals = PeriodUsage.objects.filter(meter="tokens").aggregate(
        admitted=Sum("admitted_units"), refunded=Sum("refunded_units")
    )
    assert totals["admitted"] - totals["refunded"] == used
    assert set(PeriodUsage.objects.values_list("rule", flat=True)) <= {limit.pk, None, 0}


def test_the_view_of_the_page_settles_its_stream() -> None:
    page = (Path(__file__).parents[2] / "docs" / "requests" / "settling.md").read_text()
    (snippet,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"__name__": __name__, "answer_of_model": lambda data: iter(["a", "b", "c"])}
    exec(snippet, names)
    rule("tokens", "fixed_window", scope="chat", meter="tokens", capacity=100, period=86_400, key_kind="global")
    view: Callable[..., Any] = names["ChatView"].as_view(permission_classes=[])
    answers = [_posted(view, 90) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert _posted(view, 98).status_code == 429
    wrong: list[Any] = ["lots", -5, None, [], 2**41, 8_001]
    bodies: list[Any] = [{}, *({"max_tokens": value} for value in wrong), [], None]
    for body in bodies:
        assert _posted(view, body).status_code == 400


def test_the_view_of_the_page_about_costs_has_bounds() -> None:
    names: dict[str, Any] = {"APIView": APIView}
    exec(snippet("class Answers").text, names)
    names["Answers"].post = lambda self, request: Response()
    view = names["Answers"].as_view(permission_classes=[])
    assert [_posted(view, tokens).status_code for tokens in (8_000, 8_001, 0)] == [200, 400, 400]


def _posted(view: Callable[..., Any], body: Any) -> Any:
    body = {"max_tokens": body} if isinstance(body, int) else body
    response = view(RequestFactory().post("/", body, content_type="application/json"))
    if response.status_code == 200 and response.streaming:
        assert b"".join(response.streaming_content) == b"abc"
    return response
