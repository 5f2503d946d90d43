from __future__ import annotations

import pytest

from ratelimits.models import Batch, Line
from tests.usage.traffic import NOON, at, flow, use

pytestmark = pytest.mark.django_db(transaction=True)


def test_what_was_decided_becomes_one_line_for_each_rule_it_names() -> None:
    for _ in range(3):
        use(cost=1)
    use(cost=250)
    for _ in range(4):
        use(key="api_key:2", capacity=2, rule=7, version=9)
    flow()
    rows = Line.objects.order_by("key").values(
        "account", "key", "meter", "rule", "version", "period", "bin",
        "admitted_requests", "admitted_units", "denied_requests", "denied_units",
    )  # fmt: skip
    where = {"account": "acme", "meter": "requests", "period": at("2026-11-01") // 10**6, "bin": NOON // 10**6}
    assert list(rows) == [
        {**where, "key": "api_key:1", "rule": 1, "version": 1,
         "admitted_requests": 4, "admitted_units": 253, "denied_requests": 0, "denied_units": 0},
        {**where, "key": "api_key:2", "rule": 7, "version": 9,
         "admitted_requests": 2, "admitted_units": 2, "denied_requests": 2, "denied_units": 2},
    ]  # fmt: skip


def test_draining_again_changes_nothing() -> None:
    use()
    flow()
    before = list(Line.objects.values()), list(Batch.objects.values())
    flow()
    assert (list(Line.objects.values()), list(Batch.objects.values())) == before
