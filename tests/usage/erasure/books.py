"""Make a customer who is named everywhere, and others who must not change when it is erased."""

from __future__ import annotations

import json
from typing import Any

from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.auth import get_user_model
from django.contrib.contenttypes.models import ContentType
from django.db.models import QuerySet

from ratelimits.billing.models import Adjustment
from ratelimits.billing.reports.verify.manifest import build, parse
from ratelimits.models import Access, Account, Customer, KeyOverride, KeyReset, Plan, PlanMembership, Rule, Upload
from ratelimits.moments import moment
from ratelimits.usage.counting.process_totals import TotalKey
from ratelimits.usage.ledger import process_totals
from ratelimits.usage.ledger.retention.compact import compact
from ratelimits.usage.models import Alert, AlertChannel, AlertDelivery, QuarantinedBatch, RecordedRequest, ShardState
from tests.support.customers import present
from tests.support.reports.invoices import account, close, spend
from tests.support.reports.priced import priced
from tests.support.usage.traffic import at, flow

#: The account text of the customer who is erased; its other names, and its keys.
TEXT, OTHER_TEXT, NAME, EMAIL = "ada.lovelace", "lovelace-2", "Ada King, Countess", "ada@analytical.example"
KEYS = ("user:ada", "api_key:ada-laptop")
#: Everything that must be nowhere after the erasure.
NAMES = (TEXT, OTHER_TEXT, "Ada King", EMAIL, "user:ada", "ada-laptop")
OCTOBER = at("2026-10-15") // 10**6


def customer(text: str = TEXT) -> Customer:
    """Return the customer whom a text names now."""
    return present("default", [text])[text]


def manifests(*months: str) -> list[dict[str, Any]]:
    """Return manifests as they are read from files."""
    return [parse(json.dumps(build("default", month))) for month in months]


def write(*, joined: bool = False) -> Customer:
    """Make two customers with reports, corrections and open usage, and name the first one in every table."""
    payer = priced(TEXT, included=50)
    other = account("globex", included=10)
    # `account` calls a plan by its account.
    for number, plan in enumerate(Plan.objects.order_by("pk")):
        QuerySet(Plan).filter(pk=plan.pk).update(name=f"Plan {number}", slug=f"plan-{number}")
        Plan.history.filter(id=plan.pk).update(name=f"Plan {number}", slug=f"plan-{number}")
    Account.objects.filter(pk=payer.pk).update(name=NAME)
    spend(payer, "2026-09-05", 40, key=KEYS[0])
    spend(other, "2026-09-05", 4, key="api_key:7")
    close("2026-10-02")
    for number in range(12):
        spend(payer, "2026-10-15", 7 + number, key=f"{KEYS[0]}{number or ''}")
    spend(payer, "2026-10-16", 71, key=KEYS[1], meter="tokens", rule=2, version=3)
    spend(other, "2026-10-16", 9, key="api_key:7")
    for process in ("p1", "p2"):
        totals = {
            TotalKey(kind, text, key, "requests", OCTOBER): (3, 4)
            for kind in ("admitted", "unanswered")
            for text, key in ((TEXT, KEYS[0]), ("globex", "api_key:7"), ("ada", "api_key:8"))
        }
        process_totals.write(process, totals)
    flow()
    close("2026-11-02")
    _correct()
    close("2026-11-03")
    for day in ("2026-11-05", "2026-11-06"):
        spend(payer, day, 3, key=KEYS[0])
        spend(other, day, 3, key="api_key:7")
        flow()
    if joined:
        ShardState.objects.update(watermark=at("2027-01-01"))
        assert list(compact())
        ShardState.objects.update(watermark=at("2026-11-03"))
    _trace(payer)
    return customer()


def _correct() -> None:
    author = get_user_model().objects.get_or_create(username="staff")[0]
    for text, key in ((TEXT, KEYS[0]), ("globex", "")):
        Adjustment.objects.create(
            account=text,
            key=key,
            period_start=moment(at("2026-10-01")),
            quantity=-5,
            reason=f"asked for by {NAME}, {EMAIL} (account {text})" if text == TEXT else "asked for",
            author=author,
        )


def _trace(payer: Account) -> None:
    """Name the customer in tables that no bill depends on."""
    Rule.objects.create(name="day", algorithm="fixed_window", capacity=100, period=86_400, key_kind="account")
    KeyOverride.objects.create(key=f"account:{TEXT}", rule="day", capacity=7, reason=f"{NAME} asked")
    KeyOverride.objects.create(key="account:globex", rule="day", capacity=7)
    KeyOverride.objects.create(key=KEYS[0], rule="day", capacity=8)
    assert payer.plan is not None
    PlanMembership.objects.create(key=KEYS[1], plan=payer.plan)
    block = Access.objects.create(target=f"account:{TEXT}", reason=f"{NAME} has not paid", message=TEXT)
    KeyReset.objects.create(key=f"account:{TEXT}", account=TEXT, rule="day", reason=f"{TEXT} asked")
    AlertChannel.objects.create(account=payer, email=EMAIL)
    alert = Alert.objects.create(
        id="00000000-0000-0000-0000-000000000001",
        customer=customer(),
        account=TEXT,
        meter="requests",
        rule=0,
        key=KEYS[0],
        period=at("2026-10-01") // 10**6,
        period_end=at("2026-11-01") // 10**6,
        threshold=80,
        basis="included",
        used=40,
        quantity=50,
    )
    AlertDelivery.objects.create(
        id="00000000-0000-0000-0000-000000000002",
        alert=alert,
        kind="email",
        state="failed",
        due_at=moment(at("2026-10-20")),
        error=f"{EMAIL} does not exist",
    )
    RecordedRequest.objects.create(at=at("2026-11-05"), user=KEYS[0], account=f"account:{TEXT}", scope="*", costs={})
    Upload.keep("account", 1, f"identifier,name\n{TEXT},{NAME}\n".encode(), "default")
    user = get_user_model().objects.get_or_create(username="staff")[0]
    for row in (payer, block):
        LogEntry.objects.create(
            user=user,
            content_type=ContentType.objects.get_for_model(type(row)),
            object_id=str(row.pk),
            object_repr=str(row),
            action_flag=CHANGE,
            change_message=json.dumps([{"changed": {"name": "account", "object": TEXT}}]),
        )
    line = "\t".join((TEXT, KEYS[0], "requests", "1", "1", str(OCTOBER), *"11000000"))
    raw = f"a|{OCTOBER}|requests|1|1|{TEXT}|{KEYS[0]}|1"
    for number, fields in enumerate(([line], {raw: "1", "garbage": f"of {TEXT}"})):
        QuarantinedBatch.objects.create(
            shard=0,
            name=f"x:{number}",
            reason=f"unreadable: {KEYS[0]}",
            content=str(number),
            fields=fields,
            resolution="discarded by ada",
            resolved_at=moment(at("2026-11-01")),
        )
