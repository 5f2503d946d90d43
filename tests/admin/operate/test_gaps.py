"""Test that a person can acknowledge a gap, with a reason, and that the status page then does not warn of it."""

from __future__ import annotations

import re
import time

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import Client
from django.utils.translation import override

from ratelimits.billing.reports.gaps import Gaps, describe, in_words
from ratelimits.models.accounts.named import named_now
from ratelimits.status.fact import Level
from ratelimits.status.facts import facts
from ratelimits.usage.ledger.gaps import declare
from ratelimits.usage.models import DurabilityGap, GapKind

pytestmark = pytest.mark.django_db(transaction=True)

LIST = "/admin/ratelimits_usage/durabilitygap/"
NOW = int(time.time() * 1_000_000)


@pytest.fixture
def gap() -> DurabilityGap:
    declare(
        "default", GapKind.RESTART, "a>b", since=NOW - 9_000_000, until=NOW, fsync="everysec",
        server="Valkey", answered=NOW - 7_000_000, detail="appendfsync everysec",
    )  # fmt: skip
    return DurabilityGap.objects.get()


def staff(*permissions: str) -> Client:
    user = get_user_model().objects.create_user("ada", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def level() -> Level:
    return next(fact.level for fact in facts() if fact.name == "gaps")


def acknowledge(client: Client, gap: DurabilityGap, **data: str) -> str:
    answer = client.post(LIST, {"action": "acknowledge", "_selected_action": gap.pk, **data}, follow=True)
    return answer.content.decode()


def test_a_gap_is_acknowledged_with_a_reason_that_its_history_has(gap: DurabilityGap) -> None:
    client = staff("view_durabilitygap", "acknowledge")
    assert level() is Level.AMBER
    page = acknowledge(client, gap)
    assert "Valkey restarted" in page
    assert 'name="reason"' in page
    assert "This field is required" in acknowledge(client, gap, _confirmed="1", reason="")
    assert level() is Level.AMBER
    assert "1 gaps were acknowledged" in acknowledge(client, gap, _confirmed="1", reason="planned upgrade")
    gap.refresh_from_db()
    assert (gap.acknowledged_by, gap.reason) == ("ada", "planned upgrade")
    assert gap.acknowledged_at is not None
    assert level() is Level.GREEN
    assert "planned upgrade" in LogEntry.objects.get().get_change_message()
    assert "planned upgrade" in client.get(f"{LIST}{gap.pk}/history/").content.decode()
    assert "acknowledged already" in acknowledge(client, gap)
    # A report still prints what the person has acknowledged.
    assert (
        Gaps.between("default", gap.since, gap.until)
        .text([0], named_now("default", ["acme"])["acme"], gap.since, gap.until)
        .startswith("restart ")
    )


def test_without_the_permission_nobody_can_acknowledge(gap: DurabilityGap) -> None:
    client = staff("view_durabilitygap", "resolve")
    assert "Acknowledge the selected gaps" not in client.get(LIST).content.decode()
    acknowledge(client, gap, _confirmed="1", reason="no")
    gap.refresh_from_db()
    assert gap.acknowledged_at is None


@pytest.mark.parametrize(("query", "shown"), [("open=1", True), ("open=0", False), ("", True)])
def test_the_list_can_be_filtered(gap: DurabilityGap, query: str, shown: bool) -> None:
    page = staff("view_durabilitygap").get(f"{LIST}?{query}").content.decode()
    assert ("Valkey restarted" in page) is shown


@pytest.mark.parametrize(
    ("units", "requests", "shown"),
    [
        (None, None, "–"),
        (1, None, "1 unit"),
        (1_234, 1, "1,234 units (1 request)"),
        (0, 2_000, "0 units (2,000 requests)"),
    ],
)
def test_the_list_says_what_is_missing(gap: DurabilityGap, units: int | None, requests: int | None, shown: str) -> None:
    DurabilityGap.objects.update(units=units, requests=requests)
    page = staff("view_durabilitygap").get(LIST).content.decode()
    assert f'<td class="field-missing">{shown}</td>' in page


def test_the_pages_are_in_chinese(gap: DurabilityGap) -> None:
    client = staff("view_durabilitygap", "acknowledge")
    client.defaults["HTTP_ACCEPT_LANGUAGE"] = "zh-hans"
    page = acknowledge(client, gap)
    assert "确认缺口" in page
    assert "Valkey 已重启" in page


def test_pages_of_reports_say_gaps_in_words(gap: DurabilityGap) -> None:
    text = f"{describe(gap)}; witness requests processes=12 ledger=10"
    sentence, witness = in_words(text)
    span = r"20\d\d-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.fullmatch(
        rf"the server restarted or was replaced: {span} – {span} UTC \(appendfsync=everysec\)", sentence
    )
    assert witness == "witness requests processes=12 ledger=10"
    with override("zh-hans"):
        assert in_words(text)[0].startswith("服务器")
    assert in_words("") == []
