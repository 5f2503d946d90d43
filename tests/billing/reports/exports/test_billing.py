"""Test the events for billing systems against the published schemas of these systems."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from django.conf import settings
from django.core.management import CommandError, call_command
from django.test import override_settings
from jsonschema import Draft202012Validator

from ratelimits.billing.reports.exports import FORMATS, installed
from ratelimits.billing.reports.exports.billing import NotAccepted, accepted_by_stripe
from ratelimits.billing.reports.rows import PROVISIONAL, Row
from tests.billing.reports.exports.published import LAGO, STRIPE
from tests.billing.reports.exports.samples import DECEMBER, ROW, SECOND, awkward
from tests.support.reports.invoices import account, close, spend

CORRECTION = ROW._replace(report_version=2, consumed_quantity=-3, included_quantity=-1, overage_quantity=-2)
LEFT_OUT = [ROW._replace(status=PROVISIONAL), ROW._replace(account="")]
DAY = 86_400 * SECOND


def written(name: str, *rows: Row) -> list[Any]:
    return [json.loads(line) for line in b"".join(FORMATS[name].stream(rows)).splitlines()]


def customers(account: str) -> str | None:
    return {"acme": "cus_1"}.get(account)


def test_stripe_gets_what_goes_beyond_the_plan() -> None:
    with override_settings(RATELIMITS={**settings.RATELIMITS, "BILLING_CUSTOMER": customers}):
        (event,) = written("stripe", ROW, ROW._replace(overage_quantity=0), ROW._replace(account="free"), *LEFT_OUT)
    assert event == {
        "event_name": "requests",
        "payload": {"stripe_customer_id": "cus_1", "value": "3"},
        "identifier": ROW.line_id,
        "timestamp": ROW.charge_period_end // SECOND - 1,
    }


def test_lago_gets_all_quantities() -> None:
    none = ROW._replace(consumed_quantity=0, included_quantity=0, overage_quantity=0)
    (batch,) = written("lago", ROW, none, *LEFT_OUT)
    (event,) = batch["events"]
    assert event == {
        "transaction_id": ROW.line_id,
        "external_subscription_id": "acme",
        "code": "requests",
        "timestamp": ROW.charge_period_end // SECOND - 1,
        "properties": {
            "consumed_quantity": "8",
            "included_quantity": "5",
            "overage_quantity": "3",
            "refunded_quantity": "0",
            "key": "api_key:1",
            "rule": "monthly",
            "plan": "pro",
        },
    }


@pytest.mark.parametrize(("name", "published"), [("stripe", STRIPE), ("lago", LAGO)])
def test_what_is_written_is_what_is_published(name: str, published: Draft202012Validator) -> None:
    large = ROW._replace(consumed_quantity=10**20, overage_quantity=10**20, charge_period_end=DECEMBER)
    found = written(name, ROW, CORRECTION, large, *awkward())
    assert found
    for each in found:
        published.validate(each)


def test_a_batch_for_lago_has_no_more_events_than_it_takes() -> None:
    found = written("lago", *(ROW._replace(line_id=str(number)) for number in range(201)))
    assert [len(batch["events"]) for batch in found] == [100, 100, 1]
    assert [event["transaction_id"] for batch in found for event in batch["events"]] == list(map(str, range(201)))


def test_stripe_refuses_what_is_older_than_35_days_or_lies_ahead() -> None:
    last = ROW.charge_period_end - 1
    for now in (last + 35 * DAY, last - 300 * SECOND):
        assert list(accepted_by_stripe([ROW], now)) == [ROW]
    for now in (last + 35 * DAY + 1, last - 300 * SECOND - 1):
        with pytest.raises(NotAccepted, match=rf"line_id {ROW.line_id}"):
            list(accepted_by_stripe([ROW], now))
        assert list(accepted_by_stripe(LEFT_OUT, now)) == LEFT_OUT


def test_events_for_a_billing_system_are_no_download() -> None:
    assert not {"stripe", "lago"} & {form.name for form in installed()}


def test_the_documented_sender_sends_each_event_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[4] / "docs" / "exports" / "stripe-lago.md").read_text()
    (code,) = re.findall(r"```python\n(import json, os, stripe.*?)```", page, re.DOTALL)
    sent: list[dict[str, Any]] = []
    events = SimpleNamespace(create=sent.append)
    client = SimpleNamespace(v1=SimpleNamespace(billing=SimpleNamespace(meter_events=events)))
    monkeypatch.setitem(sys.modules, "stripe", SimpleNamespace(StripeClient=lambda _key: client))
    monkeypatch.setenv("STRIPE_KEY", "sk_test")
    monkeypatch.chdir(tmp_path)
    later = [ROW, ROW._replace(line_id="a"), ROW._replace(line_id="b")]
    for found in (later[:1], later[:2], later, later):
        Path("november.stripe.ndjson").write_bytes(b"".join(FORMATS["stripe"].stream(found)))
        exec(code, {})
    assert sent == written("stripe", *later)


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("fsync_at_once")
def test_the_command_writes_no_file_that_stripe_would_refuse(tmp_path: Path) -> None:
    spend(account(included=5), "2024-01-10T12:00", cost=7)
    close("2024-02-02")
    path = tmp_path / "january.stripe.ndjson"
    with pytest.raises(CommandError, match="at most 35 days old"):
        call_command("ratelimits_report", period="2024-01", output=str(path))
    assert list(tmp_path.iterdir()) == []
    path = tmp_path / "january.lago.ndjson"
    call_command("ratelimits_report", period="2024-01", output=str(path))
    (event,) = json.loads(path.read_text())["events"]
    assert (event["external_subscription_id"], event["properties"]["overage_quantity"]) == ("acme", "2")
