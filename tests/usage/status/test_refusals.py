"""Test the refusals of all keys, those of some keys in 24 hours, and which keys of a shadow rule are listed."""

from __future__ import annotations

import time
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from ratelimits.models import Rule
from ratelimits.usage.models import KeyTotal
from ratelimits.usage.models.totals import HOUR, QUARTER
from ratelimits.usage.status import refusals
from ratelimits.usage.status.refusals import (
    TOP,
    NewRefusal,
    ShadowedKey,
    newest_refusals,
    refused_of_keys,
    shadow_refusals,
)
from tests.support.rows import rule

pytestmark = pytest.mark.django_db
NOW = 1_800_000_000 // HOUR * HOUR + 1_800


def total(
    start: int, denied: int, *, key: str = "user:1", account: str = "acme", span: int = QUARTER, **more: Any
) -> None:
    subject = {"span": span, "start": start // span * span, "account": account, "key": key, "rule": 1}
    sums = {"admitted_requests": 9, "denied_requests": denied, "shadow_requests": 9}
    KeyTotal.objects.create(**{**subject, "meter": "requests", **sums, **more})


def test_the_newest_come_first_and_then_those_with_most_requests() -> None:
    total(NOW - 2 * HOUR, 99)
    total(NOW, 0, key="user:9")
    total(NOW - QUARTER, 50)
    total(NOW, 3, key="user:2")
    total(NOW, 4, key="user:3", account="")
    total(NOW, 2, key="user:3", account="", meter="tokens")
    total(NOW, 7, span=HOUR)
    start = NOW // QUARTER * QUARTER
    found = [
        NewRefusal(start, "", "user:3", 1, 4),
        NewRefusal(start, "acme", "user:2", 1, 3),
        NewRefusal(start - QUARTER, "acme", "user:1", 1, 50),
    ]
    with CaptureQueriesContext(connection) as queries:
        assert newest_refusals(NOW, 10) == found
    assert len(queries) == 1
    assert newest_refusals(NOW, 2) == found[:2]


def test_only_so_many_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "_MAX_READ", 3)
    for number in range(9):
        total(NOW - QUARTER, 1, key=f"user:{number}")
    total(NOW, 1, key="user:10")
    assert newest_refusals(NOW, 10)[0].key == "user:10"
    assert len(newest_refusals(NOW, 10)) == 3


def test_those_of_some_keys_are_read_by_one_query() -> None:
    for ago in (0, 5 * HOUR, 23 * HOUR, 25 * HOUR):
        total(NOW - ago, 10, span=HOUR)
    total(NOW, 8, span=HOUR, meter="tokens")
    total(NOW, 1, span=HOUR, rule=2)
    total(NOW, 5, span=HOUR, account="other")
    total(NOW, 6, span=HOUR, key="user:2")
    with CaptureQueriesContext(connection) as queries:
        counts = refused_of_keys([("acme", "user:1"), ("other", "user:2")], NOW)
    assert len(queries) == 1
    assert counts["acme", "user:1"] == 31
    assert counts["other", "user:2"] == 0


def refused(row: Rule, now: int, requests: list[int]) -> None:
    """Let the rule have shadow refusals of user:0, user:1 and so on, half of them an hour ago."""
    for hour in (now, now - HOUR):
        KeyTotal.objects.bulk_create(
            KeyTotal(
                span=QUARTER,
                start=hour // QUARTER * QUARTER,
                rule=row.pk,
                meter="requests",
                account="acme",
                key=f"user:{number}",
                admitted_requests=0,
                denied_requests=0,
                shadow_requests=count // 2,
            )
            for number, count in enumerate(requests)
        )


def test_the_largest_keys_of_each_rule_are_listed_and_all_keys_are_counted() -> None:
    now = int(time.time())
    many, few, none = (rule(name, mode="shadow") for name in ("many", "few", "none"))
    refused(many, now, [2 * number for number in range(1, 26)])
    refused(few, now, [4, 6, 4])
    found = {shadow_rule.rule: shadow_rule for shadow_rule in shadow_refusals(now)}
    assert [key.requests for key in found[many].keys] == list(range(50, 30, -2))
    assert (len(found[many].keys), found[many].key_count) == (TOP, 25)
    assert found[few].keys == tuple(
        ShadowedKey("acme", f"user:{number}", requests) for number, requests in ((1, 6), (0, 4), (2, 4))
    )
    assert (found[none].keys, found[none].key_count) == ((), 0)
