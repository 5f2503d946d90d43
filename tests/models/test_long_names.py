"""Test that every row can be about an account whose identifier is as long as the ledger can store, such as an ARN."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.db import models
from django.db.models import QuerySet
from django.test import Client
from django.utils import timezone

from ratelimits.billing.models import Adjustment, PlanPrice, ReportLine
from ratelimits.billing.reports.exports import FORMATS
from ratelimits.engine.keys import LONGEST_KEY, LONGEST_NAME, ledger_name
from ratelimits.identity import Identity
from ratelimits.models import Access, Account, KeyOverride, KeyReset, Plan, PlanInclusion, PlanMembership
from ratelimits.models.keys import validate_key
from ratelimits.quota import checking
from ratelimits.row_files.comparing import LineState
from ratelimits.row_files.tables import TABLES, lines, read
from ratelimits.rules.grants import grant
from ratelimits.status.operating import reset
from ratelimits.usage import recording
from ratelimits.usage.alerts.evaluate import evaluate
from ratelimits.usage.models import AlertChannel, AlertDelivery
from tests.row_files.test_importing import imported
from tests.support.entry_points import begin_afresh
from tests.support.own_apps import own_models
from tests.support.reports.invoices import close, spend
from tests.support.reports.priced import amounts, charge, findings, written
from tests.support.rows import rule
from tests.support.usage.traffic import at, flow

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]

_ARN = "arn:aws:iam::123456789012:role/"
ARN = f"{_ARN}{'platform/team:' * 14}"[:200]
#: The longest identifier, and the longest with characters that take most bytes, and most characters in a URL.
LONGEST = f"{_ARN}{'p/' * 200}"[:LONGEST_NAME]
WIDEST = "𠮷" * LONGEST_NAME
METER = "m" * LONGEST_NAME

every_name = pytest.mark.parametrize("name", [ARN, LONGEST, WIDEST], ids=["arn", "longest", "widest"])


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    """Let no process repeat a refusal from before an edit or a reset."""
    settings.RATELIMITS = {**settings.RATELIMITS, "DENY_CACHE_SECONDS": 0}
    begin_afresh(monkeypatch)


def saved(row: Any) -> Any:
    """Validate and save a row, as a form does."""
    row.full_clean()
    row.save()
    return row


def who(name: str) -> Identity:
    return Identity("user:1", None, f"account:{name}", "ip:203.0.113.9")


def on_a_plan(name: str, meter: str = "requests") -> Account:
    """Make an account, in the past, whose plan includes 5 requests and has a price for more."""
    plan = saved(Plan(name="Pro", slug="pro", currency="EUR"))
    saved(PlanInclusion(plan=plan, meter=meter, quantity=5))
    payer: Account = saved(Account(identifier=name, plan=plan, name="Acme"))
    charge(payer, meter=meter, unit_price="0.10")
    for model in (Account, Plan, PlanInclusion, PlanPrice):
        QuerySet(model).update(since=0)
        model.history.update(since=0)
    return payer


@every_name
@pytest.mark.parametrize("meter", ["requests", METER], ids=["requests", "long meter"])
def test_an_account_gets_a_plan_a_price_and_a_report(name: str, meter: str) -> None:
    payer = on_a_plan(name, meter)
    spend(payer, "2026-11-10T12:00", 7, meter=meter)
    (report,) = close("2026-12-02")
    assert (report.account, report.plan) == (name, "pro")
    assert amounts(report) == [("1", "usage", meter, "2", "0.1", "0.2")]
    for form in FORMATS:
        assert written(report, form)
    assert ReportLine.objects.get().line_id
    assert findings() == ""


@every_name
def test_the_file_of_a_report_has_a_name_that_a_disk_can_store(admin_client: Client, name: str) -> None:
    for payer in (name, name[:-1]):
        spend(on_a_plan(payer) if payer == name else payer, "2026-11-10T12:00")
    files = {}
    for report in close("2026-12-02"):
        answer = admin_client.get(f"/admin/ratelimits_billing/report/{report.pk}/download/")
        _before, file, _after = answer["Content-Disposition"].split('"')
        assert len(file.encode()) <= 255
        assert file.endswith(".2026-11.v1.csv")
        files[file] = report.account
    assert sorted(files.values()) == sorted([name, name[:-1]])


@every_name
def test_an_override_and_a_reset_change_what_is_decided(name: str) -> None:
    rule("burst", "fixed_window", key_kind="account", capacity=1, period=3600)
    assert checking.check(who(name)).allowed
    assert not checking.check(who(name)).allowed
    override = saved(KeyOverride(key=f"account:{name}", rule="burst", capacity=2))
    assert checking.check(who(name)).allowed
    assert not checking.check(who(name)).allowed
    reset(f"account:{name}", "burst", "a bug of ours")
    assert KeyReset.objects.get().key == f"account:{name}"
    assert [checking.check(who(name)).allowed for _ in range(3)] == [True, True, False]
    override.delete()
    assert not checking.check(who(name)).allowed
    (given,) = grant(f"account:{name}", "burst", 5, timezone.now() + timedelta(hours=1), "a launch")
    assert (given.key, given.capacity) == (f"account:{name}", 6)


@every_name
def test_a_block_refuses_the_account_and_an_allow_lets_it_pass(name: str) -> None:
    rule("burst", "fixed_window", key_kind="account", capacity=1, period=3600)
    block = saved(Access(target=f"account:{name}", reason="abuse"))
    assert not checking.check(who(name)).allowed
    assert checking.check(who(name[:-1])).allowed
    block.delete()
    saved(Access(target=f"account:{name}", effect=Access.Effect.ALLOW, reason="a friend"))
    assert [checking.check(who(name)).allowed for _ in range(3)] == [True, True, True]


@every_name
def test_a_membership_puts_a_key_on_a_plan(name: str) -> None:
    """The plan of an account is in its own row. So a membership is for another key, as long as the ledger can store."""
    user = f"user:{name}"[:LONGEST_NAME]
    plan = saved(Plan(name="Pro", slug="pro"))
    rule("burst", "fixed_window", key_kind="user", capacity=1, period=3600)
    rule("burst", "fixed_window", key_kind="user", capacity=3, period=3600, plan=plan)
    membership = saved(PlanMembership(key=user, plan=plan))
    asking = Identity(user, None, f"account:{name}", "ip:203.0.113.9")
    assert [checking.check(asking).allowed for _ in range(4)] == [True, True, True, False]
    membership.delete()


@every_name
def test_an_alert_is_raised_and_goes_to_the_channel(name: str) -> None:
    payer = on_a_plan(name)
    saved(AlertChannel(account=payer, email="ops@example.com"))
    spend(payer, "2026-11-10T12:00", 5)
    flow()
    assert {(alert.account, alert.used) for alert in evaluate(at("2026-11-21T12:00"))} == {(name, 5)}
    assert AlertDelivery.objects.count()


@every_name
def test_an_adjustment_is_on_the_next_version_of_the_report(name: str) -> None:
    payer = on_a_plan(name)
    spend(payer, "2026-11-10T12:00", 7)
    close("2026-12-02")
    author = User.objects.create(username="finance")
    about = {"account": name, "key": "user:" + "u" * (LONGEST_NAME - 5), "meter": "requests"}
    saved(Adjustment(period_start="2026-11-01T00:00Z", quantity=-1, reason="goodwill", author=author, **about))
    (second,) = close("2026-12-03")
    assert (second.version, second.account) == (2, name)


@every_name
def test_rows_are_exported_and_imported(name: str) -> None:
    plan = saved(Plan(name="Pro", slug="pro"))
    rule()
    key, user = f"account:{name}", f"user:{name}"[:LONGEST_NAME]
    files: dict[type[Account | PlanMembership | KeyOverride], str] = {
        Account: f"identifier,plan\n{name},pro",
        PlanMembership: f"key,plan\n{user},pro",
        KeyOverride: f"key,rule,capacity\n{key},burst,5",
    }
    for model, file in files.items():
        table = TABLES[model]
        assert imported(read(file.encode(), table), model=model).counts[LineState.NEW] == 1
        (row,) = lines(table, model.objects.all())
        assert row[0] == {Account: name, PlanMembership: user, KeyOverride: key}[model]
    assert Account.objects.get().plan == plan


@every_name
def test_requests_are_recorded(name: str) -> None:
    recording.write_rows(
        [(1, Identity("user:" + "u" * 250, "api_key:1", f"account:{name}", "ip:203.0.113.9"), "*", "GET", {}, False)]
    )
    assert [row.account for row in recording.newest(0, 9).rows] == [f"account:{name}"]


@every_name
def test_the_admin_takes_an_account_and_finds_its_key(admin_client: Client, name: str) -> None:
    empty = {"alert_channels-TOTAL_FORMS": "0", "alert_channels-INITIAL_FORMS": "0"}
    form = {"identifier": name, "name": "Acme", "timezone": "UTC", **empty}
    answer = admin_client.post("/admin/ratelimits/account/add/", form)
    assert answer.status_code == 302, answer.content.decode()
    assert Account.objects.get().identifier == name
    page = admin_client.get("/admin/ratelimits/inspect/", {"q": f"account:{name}"})
    assert page.status_code == 200
    assert "at most" not in page.content.decode()


def test_a_longer_name_is_refused_where_it_is_written() -> None:
    """The app counts a longer name under its digest, so that an override for the name itself would never apply."""
    for key in (f"account:{'x' * (LONGEST_NAME + 1)}", f"user:{'x' * (LONGEST_NAME - 4)}"):
        with pytest.raises(ValidationError, match="at most 2"):
            validate_key(key)
    for key in (f"account:{'x' * LONGEST_NAME}", f"user:{'x' * (LONGEST_NAME - 5)}"):
        validate_key(key)
        assert len(key) <= LONGEST_KEY
        assert ledger_name(key.removeprefix("account:")) == key.removeprefix("account:")


def _columns() -> Iterator[tuple[str, models.Field[Any, Any]]]:
    for model in own_models():
        for field in model._meta.local_fields:
            if isinstance(field, models.CharField) and field.name != "id":
                yield f"{model.__name__}.{field.name}", field


def test_every_column_of_a_name_has_room_for_the_longest() -> None:
    """Check the columns by name, so that a new column with a name of an account, key or meter is not forgotten."""
    names, keys = {"account", "identifier", "meter", "customer"}, {"key", "target", "user", "api_key", "address"}
    room = {path: field.max_length for path, field in _columns() if field.name in names | keys}
    assert len(room) > 25
    assert {path: length for path, length in room.items() if length not in (LONGEST_NAME, LONGEST_KEY)} == {}
    for path in ("KeyOverride.key", "PlanMembership.key", "Access.target", "KeyReset.key", "Tombstone.key"):
        assert room[path] == LONGEST_KEY == len("account:") + LONGEST_NAME
