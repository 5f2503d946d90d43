"""Test what open periods show: what would be billed now."""

from __future__ import annotations

import csv
import io
from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from django.db.models import QuerySet

from ratelimits.billing.management.commands import ratelimits_report
from ratelimits.billing.models import Adjustment
from ratelimits.billing.reports.closing.open_periods import open_periods
from ratelimits.billing.reports.statements import rows, statements
from ratelimits.models import Account
from tests.billing.reports.closing.test_close import adjust
from tests.support.reports.invoices import account, close, spend
from tests.support.usage.traffic import at, flow

pytestmark = pytest.mark.django_db(transaction=True)


def shown(month: str = "2026-10", **options: Any) -> list[tuple[str, str, str, int, int, int]]:
    return [
        (
            *(each.account, each.status, each.charge_category),
            *(each.consumed_quantity, each.included_quantity, each.overage_quantity),
        )
        for each in rows(statements(month, **options))
    ]


def test_provisional_lines_have_what_people_adjusted() -> None:
    spend(account(included=40), "2026-10-15", 50)
    flow()
    adjust(-20)
    expected = [("acme", "usage", 50, 40, 10), ("acme", "adjustment", -20, -10, -10)]
    assert [(each[0], *each[2:]) for each in shown()] == expected
    assert {each[1] for each in shown()} == {"provisional"}
    (found,) = open_periods(at("2026-11-02"))
    assert found.units == {"requests": 30}
    close("2026-11-02")
    assert [(each[0], *each[2:]) for each in shown()] == expected
    assert {each[1] for each in shown()} == {"final"}


def test_an_account_whose_time_zone_is_no_more_does_not_end_the_export_of_all() -> None:
    for name in ("acme", "globex"):
        account(name, included=3)
        spend(name, "2026-10-15", 5)
        account(f"idle-{name}")
    flow()
    before = shown(all_accounts=True)
    assert [each[0] for each in before] == ["acme", "globex", "idle-acme", "idle-globex"]
    for name in ("acme", "idle-acme"):
        QuerySet(Account).filter(identifier=name).update(timezone="Mars/Olympus")
        Account.history.filter(identifier=name).update(timezone="Mars/Olympus")
    assert shown(all_accounts=True) == before


def test_a_period_of_adjustments_alone_is_shown_in_its_place() -> None:
    for name in ("acme", "b", "zeta"):
        account(name)
    spend("zeta", "2026-10-15", 1)
    spend("b", "2026-10-15", 1)
    flow()
    adjust(7)
    assert [each[0] for each in shown()] == ["acme", "b", "zeta"]
    assert shown(account="acme") == [("acme", "provisional", "adjustment", 7, 0, 7)]
    assert shown(account="b")[0][2] == "usage"
    assert [each[0] for each in shown(all_accounts=True)] == ["acme", "b", "zeta"]


def test_an_adjustment_of_a_closed_period_leaves_its_report_as_it_is() -> None:
    spend(account(), "2026-10-15", 50)
    close("2026-11-02")
    adjust(-20)
    assert shown() == [("acme", "final", "usage", 50, 0, 50)]


def test_anonymous_usage_is_adjusted_like_any_other() -> None:
    spend("", "2026-10-15", 5, key="anonymous")
    close("2026-11-02")
    author = get_user_model().objects.create(username="ada")
    about: dict[str, Any] = {"account": "", "quantity": -2, "reason": "a crawler", "author": author}
    adjustment = Adjustment(**about, period_start=datetime(2026, 10, 1, tzinfo=UTC))
    adjustment.full_clean()
    adjustment.save()
    (second,) = close("2026-11-03")
    assert str(second) == "anonymous 2026-10 v2"
    assert shown() == [("", "final", "usage", 5, 0, 5), ("", "final", "adjustment", -2, 0, -2)]
    with pytest.raises(Exception, match="No period with anonymous usage"):
        Adjustment(**about, period_start=datetime(2026, 9, 1, tzinfo=UTC)).full_clean()


def report(*options: str) -> tuple[list[str], str]:
    """Return the accounts in the file, and the standard error."""
    out, err = io.StringIO(), io.StringIO()
    call_command("ratelimits_report", *options, period="2026-10", format="csv", stdout=out, stderr=err)
    return [row["account"] for row in csv.DictReader(io.StringIO(out.getvalue()))], err.getvalue()


def test_a_file_of_final_and_provisional_reports_says_so_and_can_be_of_final_ones_alone() -> None:
    spend(account(), "2026-10-15", 5)
    close("2026-11-02")
    assert "provisional" not in report()[1]
    spend(account("other"), "2026-10-15", 5)
    flow()
    accounts, said = report()
    assert accounts == ["acme", "other"]
    assert "1 of 2 reports is provisional and may change" in said
    accounts, said = report("--final-only")
    assert accounts == ["acme"]
    assert "1 of 2 reports is left out: not all periods are finalised" in said
    with pytest.raises(CommandError, match="use only one of"):
        report("--final-only", "--all-accounts")


@pytest.mark.parametrize(
    ("today", "said"),
    [
        ("2026-10-20", "2 of 2 reports are provisional and may change: {option}. 2 periods still run.\n"),
        ("2026-11-02", "2 of 2 reports are provisional and may change: {option}. {command}\n"),
    ],
)
def test_the_reasons_of_open_periods_are_listed_only_if_a_period_has_ended(
    today: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a period that still runs, `ratelimits_finalise --open` has no reason to list."""
    monkeypatch.setattr(ratelimits_report, "time_ns", lambda: at(today) * 1000)
    for name in ("acme", "other"):
        spend(account(name), "2026-10-15", 5)
    flow()
    option = "leave out provisional reports with --final-only"
    command = "ratelimits_finalise --open lists the reasons why periods that have ended are still open."
    assert report()[1].startswith(said.format(option=option, command=command))


def test_an_ended_period_without_usage_is_not_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ratelimits_report, "time_ns", lambda: at("2026-11-02") * 1000)
    account()
    said = report("--all-accounts")[1]
    assert "1 of 1 reports is provisional" in said
    assert "ratelimits_finalise" not in said
    assert "still run" not in said
