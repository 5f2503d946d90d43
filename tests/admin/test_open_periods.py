from __future__ import annotations

import re
from html import unescape
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from ratelimits.models import DurabilityGap, QuarantinedBatch, Report, ShardState
from ratelimits.reports.closing.close import home_shard
from tests.admin.test_usage import text, url
from tests.support.reports.invoices import account, spend
from tests.support.usage.traffic import at, flow

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]


@pytest.mark.parametrize("name", ["acme", "a&b <i>", ""])
def test_staff_see_why_a_period_is_open_and_close_it_by_force(admin_client: Client, name: str) -> None:
    spend(account(name) if name else "", "2025-10-15", 5)
    flow()
    ShardState.objects.update(watermark=at("2025-10-20"))
    page = admin_client.get(url(Report, "open"))
    assert "is complete until 2025-10-20T00:00:00Z" in text(page)
    assert "<i>" not in page.content.decode()
    about: dict[str, Any] = {"account": name, "start": at("2025-10-01")}
    assert "Close by force" in text(admin_client.get(url(Report, "force"), about))
    refused = admin_client.post(url(Report, "force"), {**about, "reason": ""})
    assert refused.status_code == 200
    assert not Report.objects.exists()
    done = admin_client.post(url(Report, "force"), {**about, "reason": "the invoice is due"}, follow=True)
    assert "was finalised" in text(done)
    assert Report.objects.get().account == name
    assert DurabilityGap.objects.get(kind="forced").detail.startswith("admin: the invoice is due (shard ")
    again = admin_client.post(url(Report, "force"), {**about, "reason": "once more"}, follow=True)
    assert "has no open period that starts" in text(again)


def test_without_open_periods_the_page_says_so(admin_client: Client) -> None:
    assert "There are no such periods." in text(admin_client.get(url(Report, "open")))
    for start in ("²", "9" * 20, "-1"):
        assert admin_client.get(url(Report, "force"), {"start": start}).status_code == 200
        assert admin_client.post(url(Report, "force"), {"start": start, "reason": "x"}).status_code == 200


def test_a_quarantined_batch_is_a_link_for_those_who_may_see_it(admin_client: Client, client: Client) -> None:
    spend(account(), "2025-10-15", 5)
    flow()
    shard = home_shard("acme")
    ShardState.objects.filter(shard=shard).update(frozen=True)
    for number in (shard, shard + 1):
        QuarantinedBatch.objects.create(shard=number, name="1:1", reason="it came again", content="0" * 64)
    page = admin_client.get(url(Report, "open")).content.decode()
    (link,) = re.findall(f'<a href="([^"]*)">Quarantined batches of shard {shard:02d}</a>', page)
    listed = admin_client.get(unescape(link)).context["cl"].result_list
    assert [str(each) for each in listed] == [f"{shard:02d}:1:1"]
    user = User.objects.create(username="reader", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_report"))
    client.force_login(user)
    page = client.get(url(Report, "open")).content.decode()
    assert "has a quarantined batch" in page
    assert "Quarantined batches of shard" not in page
