"""Test which keys of a shadow rule are listed, and that the others are only counted."""

from __future__ import annotations

import time

import pytest

from ratelimits.models import KeyTotal, Rule
from ratelimits.models.status.totals import HOUR, QUARTER
from ratelimits.status.shadow_refusals import TOP, ShadowedKey, shadow_refusals
from tests.support.rows import rule

pytestmark = pytest.mark.django_db


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
