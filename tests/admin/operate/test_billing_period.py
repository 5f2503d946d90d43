"""Test how a grant of more permits describes a limit per billing period."""

from __future__ import annotations

from typing import Any

import pytest

from ratelimits.admin.operate.offered import offered_rules
from ratelimits.identity import Identity
from ratelimits.models import Account
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

DAY = 86_400


@pytest.mark.parametrize("terms", [None, {"timezone": "Asia/Tokyo", "billing_anchor": "2026-01-10T00:00"}])
def test_more_is_given_in_each_billing_period(terms: dict[str, Any] | None) -> None:
    rule("per-period", "calendar_window", capacity=100, calendar_unit="billing_period", key_kind="account")
    if terms is not None:
        Account.objects.create(identifier="1", **terms)
    (offered,) = offered_rules(Identity(account="account:1"), "account:1")
    assert offered.grant_label == (
        "per-period: 100 requests per billing period, per account – gives more in each billing period"
    )
    assert offered.extra_text(5) == "5 more requests in each billing period"
    assert offered.has_long_window
    assert [offered.window_is_shorter_than(days * DAY) for days in (27, 32)] == [False, True]
