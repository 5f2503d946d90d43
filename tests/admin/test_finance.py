"""Close a month as finance does it, with the admin and docs/billing only, whatever happened in the month."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client

from ratelimits.admin.typed import moment_inputs
from ratelimits.billing.models import Adjustment, Report
from ratelimits.billing.reports.closing.close import finalise, home_shard
from ratelimits.models import Account
from ratelimits.usage.ledger import gaps
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.ledger.tally import tally
from ratelimits.usage.models import GapKind, QuarantinedBatch, ShardState
from tests.admin.test_adjustments import ADD, sent_again
from tests.admin.test_usage import text, url
from tests.support.raw import RawRedis
from tests.support.reports.invoices import account, spend
from tests.support.usage.traffic import at, flow

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]


@pytest.fixture
def finance(client: Client) -> Client:
    """Return a client of a user who may see reports and the ledger, resolve and adjust, and do nothing else."""
    user = User.objects.create(username="finance", is_staff=True)
    names = [f"view_{each}" for each in ("report", "reportline", "durabilitygap", "quarantinedbatch", "adjustment")]
    for name in (*names, "resolve", "add_adjustment", "finalise"):
        user.user_permissions.add(Permission.objects.get(codename=name))
    client.force_login(user)
    return client


def worker() -> None:
    """Do what Celery does every few minutes, at a time long after the month."""
    flow()
    ShardState.objects.filter(frozen=False).update(watermark=at("2025-11-02"))
    finalise()


def billed(client: Client, **options: str) -> dict[str, list[int]]:
    """Return, for each account, the sums of consumed and overage quantities in the month's file."""
    page = client.get(f"{url(Report)}download/", {"period": "2025-10", "format": "csv", **options})
    content = b"".join(page.streaming_content).decode()  # type: ignore[attr-defined]
    sums: dict[str, list[int]] = {}
    for row in csv.DictReader(io.StringIO(content)):
        held = sums.setdefault(row["account"], [0, 0])
        held[0] += int(row["consumed_quantity"]) - int(row["refunded_quantity"])
        held[1] += int(row["overage_quantity"])
    return sums


def listed(client: Client, **filters: str) -> list[str]:
    return [str(report) for report in client.get(url(Report), filters).context["cl"].result_list]


def test_finance_closes_a_month_with_a_quarantine_a_leaver_a_late_batch_and_a_wrong_adjustment(
    finance: Client, redis_client: RawRedis
) -> None:
    acme, leaver, initech = (account(name, included=40) for name in ("acme", "leaver", "initech"))
    assert len({home_shard(name) for name in ("acme", "leaver", "initech")}) == 3
    spend(leaver, "2025-10-10", 30)
    spend(initech, "2025-10-10", 60)
    spend(acme, "2025-10-10", 50)
    seal()
    (key,) = (key for key in redis_client.keys("rl:1:test:*:b:*") if f"{{{home_shard('acme'):02d}}}".encode() in key)
    fields: Any = redis_client.hgetall(key)
    flow()
    leaver.delete()
    # The server went back to an older state and went on counting: the batch comes again with more in it.
    count = next(name for name in fields if name.endswith(b"|u"))
    more = {**fields, count: b"70"}
    redis_client.hset(key, mapping={**more, b"#c": str(int(fields[b"#c"]) + 20).encode()})
    redis_client.rpush(f"rl:1:test:{{{home_shard('acme'):02d}}}:sealed", key.decode().partition(":b:")[2])
    drain(at("2100-01-01"))
    tally()
    worker()

    # Open periods: the page says why each is open.
    page = text(finance.get(url(Report, "open")))
    assert "has a quarantined batch: accept or discard it" in page
    assert listed(finance, month="2025-10") == ["initech 2025-10 v1", "leaver 2025-10 v1"]
    warned = text(finance.get(f"{url(Report)}download/", {"period": "2025-10", "final": "1"}, follow=True))
    assert "The file lacks acme, October 2025: shard " in warned
    assert billed(finance, final="1", lacking="1") == {"leaver": [30, 0], "initech": [60, 20]}
    assert set(billed(finance)) == {"acme", "leaver", "initech"}

    # The quarantined batch: the page shows what it would add; accept it.
    kept = QuarantinedBatch.objects.get()
    assert "20" in text(finance.get(url(QuarantinedBatch, "change", kept.pk)))
    chosen = {"action": "accept", "_selected_action": [kept.pk]}
    assert "acme api_key:1: 20 requests" in text(finance.post(url(QuarantinedBatch), chosen))
    done = finance.post(url(QuarantinedBatch), {**chosen, "post": "yes"}, follow=True)
    assert "accepted by finance" in text(done)
    worker()
    assert "No open period of a month that is over was found." in text(finance.get(url(Report, "open")))
    assert billed(finance, final="1")["acme"] == [70, 30]

    # A late batch: the report has a further version, and a filter of the list shows it.
    spend(Account.objects.get(identifier="initech"), "2025-10-31T23:59", 5)
    worker()
    assert listed(finance, month="2025-10", corrected="1") == ["initech 2025-10 v2"]
    assert billed(finance)["initech"] == [65, 25]

    # An adjustment with a typing error: ten times the intended quantity. It is on a report already.
    start = moment_inputs("period_start", datetime(2025, 10, 1, tzinfo=UTC))
    wrong = {"account": "acme", **start, "meter": "requests", "reason": "goodwill", "quantity": "-200"}
    asked = finance.post(ADD, wrong)
    assert "The adjustment is -200 units: ≈ 285.71 % of the 70 units that were used." in text(asked)
    assert finance.post(ADD, sent_again(asked, _large_meant="1")).status_code == 302
    action = {"action": "finalise", "_selected_action": [Adjustment.objects.get().pk]}
    assert "acme 2025-10 v2 was finalised." in text(finance.post(url(Adjustment), action, follow=True))
    again = text(finance.post(url(Adjustment), action, follow=True))
    assert "is on report acme 2025-10 v2." in again
    assert "open" not in again
    assert billed(finance)["acme"][0] == -130
    right = finance.post(ADD, {**wrong, "quantity": "180", "reason": "-20 was meant, not -200"})
    assert right.context["effect"].after.billed == 50
    assert finance.post(ADD, sent_again(right, _large_meant="1")).status_code == 302
    worker()
    assert billed(finance)["acme"] == [50, 10]

    # A gap is declared after everything was closed: a filter of the list shows it.
    assert listed(finance, month="2025-10", gaps__isempty="0") == []
    day = at("2025-10-12")
    gaps.declare("default", GapKind.WIPE, "1", shard=home_shard("acme"), since=day, until=day + 1)
    worker()
    assert listed(finance, month="2025-10", gaps__isempty="0") == ["acme 2025-10 v4"]
    assert billed(finance)["acme"] == [50, 10]
