"""Test that requests which were not counted are named, if no report states their account."""

from __future__ import annotations

import html
import io
import re
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client
from django.urls import reverse

from ratelimits.billing.reports.statements.unstated import unstated
from ratelimits.usage.counting.process_totals import TotalKey
from ratelimits.usage.ledger.process_totals import write
from tests.support.usage.traffic import NOON, flow, use

pytestmark = pytest.mark.django_db(transaction=True)

BIN = NOON // 1_000_000


def lost(kind: str, requests: int, account: str, *meters: str, at: int = BIN) -> None:
    meters = meters or ("requests",)
    key = f"account:{account}" if account else "anonymous"
    write("p", {TotalKey(kind, account, key, meter, at): (requests, requests) for meter in meters})  # type: ignore[arg-type]


def said(**options: Any) -> str:
    err = io.StringIO()
    call_command("ratelimits_report", period="2026-11", stdout=io.StringIO(), stderr=err, **options)
    return err.getvalue()


def test_a_report_names_requests_of_accounts_that_it_does_not_have() -> None:
    use("acme")
    flow()
    lost("unmetered", 3, "acme")
    assert "unmetered" not in said()  # acme's own report prints the gap
    lost("unmetered", 6, "other", "requests", "tokens")
    lost("unmetered", 1, "")
    lost("unanswered", 1, "third")
    words = said(format="json")
    unmetered = "were admitted unmetered, and no report states these accounts"
    assert f"7 requests of 2 accounts {unmetered}: anonymous, other." in words
    assert "1 request of 1 account got no reply from Redis, and no report states these accounts: third." in words
    assert "acme" not in "".join(line for line in words.splitlines() if "states" in line)
    assert "6 requests of 1 account were" in said(account="other")
    assert "states" not in said(account="acme")


def test_only_the_month_and_only_what_is_known_counts() -> None:
    lost("unmetered", 5, "earlier", at=BIN - 31 * 86_400)
    lost("admitted", 5, "counted")
    assert list(unstated("default", "2026-11")) == []
    write(
        "p",
        {
            TotalKey("unmetered", "mixed", "user:1", "requests", BIN): (5, 5),
            TotalKey("unmetered", "mixed", "user:1", "tokens", BIN): (2, 9),
        },
    )
    (found,) = unstated("default", "2026-11")
    assert found.requests.text == "at least 5 requests"


def test_many_accounts_are_counted_and_the_first_named() -> None:
    for number in range(7):
        lost("unmetered", 1, f"a{number}")
    assert "7 requests of 7 accounts were admitted unmetered" in said()
    assert "a0, a1, a2, a3, a4, and others." in said()


@pytest.mark.parametrize("chosen", [{}, {"final": "1"}])
def test_the_admin_names_them_before_the_file(admin_client: Client, chosen: dict[str, str]) -> None:
    lost("unmetered", 6, "other", "requests", "tokens")
    url = reverse("admin:ratelimits_billing_report_download_month")
    chosen = {"period": "2026-11", "format": "csv", **chosen}
    page = admin_client.get(url, chosen, follow=True).content.decode()
    assert "Requests were admitted unmetered: 6 requests of accounts that no report states: other." in page
    (link,) = re.findall(r'href="([^"]*lacking=1)"', page)
    assert admin_client.get(html.unescape(link))["Content-Type"] == "text/csv; charset=utf-8"
