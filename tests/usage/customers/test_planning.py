"""Test what a move says that it will do: it does exactly this, and reports are corrected by adjustments."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db.models import Sum

from ratelimits.billing.models import Adjustment, Report, ReportLine
from ratelimits.billing.reports.verify.printed import verify_printed
from ratelimits.billing.reports.verify.report import verify_report
from ratelimits.billing.reports.verify.totals import verify_totals
from ratelimits.models import Access, Account, Customer, Move, Name, Plan
from ratelimits.models.customers import make_missing
from ratelimits.usage.customers.move import ChangedMeanwhileError, move
from ratelimits.usage.customers.planning import MovedUsage, NotMovedError, find_customer, next_quarter, plan
from ratelimits.usage.customers.wording import as_json, rows, sentences, warnings
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.models import Line, PeriodUsage
from tests.support.customers import present
from tests.support.reports.invoices import account, close, spend
from tests.support.usage.traffic import at, flow

pytestmark = pytest.mark.django_db

SECOND = 10**6
DAY = 86_400
OCTOBER, NOVEMBER = (at(f"2026-{month}-01") // SECOND for month in (10, 11))


def customer(text: str) -> Customer:
    make_missing("default", [text])
    return present("default", [text])[text]


@pytest.fixture
def ada() -> User:
    return User.objects.create(username="ada")


def said(text: str, to: Customer | None = None, since: int | None = None) -> str:
    planned = plan("default", text, to, since)
    return "\n".join([*warnings(planned), *sentences(planned)])


def units(moved: list[MovedUsage]) -> list[tuple[str, int, str, str]]:
    return [(usage.meter, usage.units, usage.period.name, usage.to_period.name) for usage in moved]


def totals() -> dict[tuple[int, str], int]:
    sums: Counter[tuple[int, str]] = Counter()
    for row in PeriodUsage.objects.all():
        sums[row.customer_id, row.account] += row.admitted_units
    return dict(sums)


def adjusted() -> dict[tuple[int, str], int]:
    """Return the units of all adjustments, by customer and by the UTC day at which the billing period starts."""
    sums: Counter[tuple[int, str]] = Counter()
    for row in Adjustment.objects.all():
        sums[row.customer_id, f"{row.period_start:%Y-%m-%d}"] += row.quantity
    return dict(sums)


def billed() -> dict[tuple[str, str], int]:
    """Return the units on all versions of reports, by token of the customer and by month; also verify the reports."""
    assert [error for report in Report.objects.all() for error in verify_report(report)] == []
    assert list(verify_totals("default")) == []
    assert list(verify_printed("default")) == []
    rows = ReportLine.objects.order_by().values_list("report__customer__token", "report__label")
    return {(token, label): units for token, label, units in rows.annotate(Sum("consumed_quantity"))}


def test_each_kind_of_move_has_its_word() -> None:
    for text in ("acme", "bolt"):
        spend(account(text), "2026-11-02")
    flow()
    acme, bolt = customer("acme"), customer("bolt")
    assert "check the spelling" in said("acme-inc", acme)
    assert "Rename: customer " in said("acme-inc", acme)
    assert move("acme-inc", acme).kind == "rename"
    assert "Reuse: acme, a former name of customer " in said("acme")
    assert "Split: acme-inc goes from customer " in said("acme-inc")
    assert "keeps acme, to" in said("acme-inc")
    assert "acme-inc, to customer" in said("acme", bolt)
    assert plan("default", "acme", bolt).kind == "give"
    assert "Reuse: bolt" in said("bolt")
    assert "Merge: bolt is the only text" in said("bolt", acme)
    assert move("bolt", acme).kind == "merge"
    assert "Swap: customer " in said("acme", bolt)
    assert move("acme", bolt).kind == "swap"
    assert "There is nothing" not in said("acme", acme)
    assert plan("default", "acme", bolt).changes_nothing
    assert [made.kind for made in Move.objects.order_by("pk")] == ["rename", "merge", "swap"]
    waiting = move("acme").former
    assert waiting == bolt
    assert f"Rename: customer {bolt.token} (no text now) gets the new text bolt-inc." in said("bolt-inc", bolt)


def test_a_name_that_is_used_already_but_has_no_account_and_no_report_is_that_of_a_rename() -> None:
    account()
    acme = customer("acme")
    spend("acme-inc", "2026-10-02")
    spend("carl", "2026-11-02")
    flow()
    assert plan("default", "acme-inc", acme).kind == plan("default", "carl", acme).kind == "rename"
    assert "which was used already, but has no account and no report yet" in said("acme-inc", acme)
    close("2026-11-03")
    assert plan("default", "acme-inc", acme).kind == "merge"
    assert plan("default", "carl", acme).kind == "rename"
    account("carl")
    assert plan("default", "carl", acme).kind == "merge"


def test_what_stays_with_the_former_customer_and_what_the_new_one_has_is_said() -> None:
    pro = Plan.objects.create(name="Pro", slug="pro")
    Account.objects.create(identifier="bolt", plan=pro, timezone="Asia/Tokyo")
    Access.objects.create(target="account:acme", reason="has not paid")
    text = said("acme", customer("bolt"))
    assert "1 override, block or allow of account:acme stays with its former customer." in text
    assert "acme then has the plan and the terms of the customer: Pro, Asia/Tokyo." in text
    assert "no plan, UTC" in said("acme")
    assert "Limits, overrides and blocks switch at once, when you confirm." in text


def test_usage_of_open_periods_is_listed_and_then_counted_again() -> None:
    account("bolt", timezone="Asia/Tokyo")
    bolt = customer("bolt")
    spend("acme", "2026-10-30T12:00", 5)
    spend("acme", "2026-10-31T16:00", 7)
    spend("acme", "2026-10-31T16:00", 9, meter="tokens")
    flow()
    since = at("2026-10-31T12:00") // SECOND
    planned = plan("default", "acme", bolt, since)
    expected = [("requests", 7, "2026-10", "2026-11"), ("tokens", 9, "2026-10", "2026-11")]
    assert units(planned.counted_again) == expected
    assert [row[1:3] for row in rows(planned)] == [("requests", "7"), ("tokens", "9")]
    assert as_json(planned)["usage"][0] == {
        "how": "counted again",
        "meter": "requests",
        "units": 7,
        "former": customer("acme").token,
        "period": "2026-10",
        "to_period": "2026-11",
    }
    former = customer("acme")
    moved = move("acme", bolt, since)
    assert moved.counted_again
    assert totals() == {(former.pk, "acme"): 5, (bolt.pk, "acme"): 16}
    assert plan("default", "acme", bolt, since).counted_again == []


def test_usage_of_before_that_stays_behind_is_said_with_its_customer_and_the_moment_from_which_it_goes_along() -> None:
    Account.objects.create(identifier="old-name", plan=Plan.objects.create(name="Pro", slug="pro"))
    old = customer("old-name")
    spend("new-name", "2026-11-02T06:00", 213)
    spend("new-name", "2026-11-02T06:20", 3839, meter="tokens")
    flow()
    token, since = customer("new-name").token, at("2026-11-02T09:15") // SECOND
    text = said("new-name", old, since)
    assert (
        "Usage of new-name of before 2026-11-02 09:15 UTC in open periods stays with"
        f" customer {token}: 213 requests, 3,839 tokens." in text
    )
    assert "This customer has no plan, so nobody pays for this usage." in text
    assert "“since its first usage” (in the command: --since beginning), or 2026-11-02 06:00 UTC." in text
    staying = as_json(plan("default", "new-name", old, since))["staying"]
    assert [(one["former"], one["meter"], one["units"]) for one in staying] == [
        (token, "requests", 213),
        (token, "tokens", 3839),
    ]
    for earlier in (0, at("2026-11-02T06:00") // SECOND):
        assert plan("default", "new-name", old, earlier).staying == []
        assert "open periods stays with" not in said("new-name", old, earlier)
    assert "3,839 tokens" in said("new-name", None, since)
    Account.objects.create(identifier="new-name", plan=Plan.objects.get())
    assert "nobody pays" not in said("new-name", old, since)


def test_usage_that_stays_is_that_of_open_periods_alone() -> None:
    payer = account("bolt")
    spend(payer, "2026-10-20", 5)
    close("2026-11-03")
    spend(payer, "2026-11-02", 7)
    flow()
    assert ": 7 requests." in said("bolt", customer("acme"))
    spend("carl", "2026-11-02", 8)
    seal()
    drain(at("2026-11-03"))
    assert "stays with a new customer: 8 requests." in said("carl", customer("acme"))


def test_who_moved_what_when_and_why_is_stored(ada: User) -> None:
    former = customer("acme")
    moved = move("acme", None, by=ada, reason="sold")
    row = Move.objects.get()
    assert row == moved
    assert (row.text, row.former, row.customer, row.by, row.reason) == ("acme", former, customer("acme"), ada, "sold")
    assert row.since == moved.since
    assert row.adjusted_since is None
    assert move("acme", customer("acme")).pk is None
    assert Move.objects.count() == 1
    ada.delete()
    row.refresh_from_db()
    assert row.by is None


def closed_october() -> Customer:
    """Let acme use 5 and 6 units in October, of which there is a report, and 7 in November."""
    payer = account()
    spend(payer, "2026-10-05", 5)
    spend(payer, "2026-10-20", 6)
    spend(payer, "2026-11-02", 7)
    close("2026-11-03")
    assert Report.objects.count() == 1
    return customer("acme")


def test_usage_on_reports_goes_to_a_customer_who_exists_by_adjustments_in_its_own_period(ada: User) -> None:
    former = closed_october()
    account("bolt", timezone="Asia/Tokyo")
    bolt = customer("bolt")
    since = at("2026-10-10") // SECOND
    planned = plan("default", "acme", bolt, since)
    assert planned.since == NOVEMBER
    assert units(planned.adjusted) == [("requests", 6, "2026-10", "2026-10")]
    assert units(planned.counted_again) == [("requests", 7, "2026-11", "2026-11")]
    assert (
        "Reports have usage of acme or of the customer up to 2026-11-01 00:00 UTC, and reports never change."
        in said("acme", bolt, since)
    )
    with pytest.raises(NotMovedError, match=r"up to 2026-11-01 00:00 UTC: choose this moment or a later one\. Or say"):
        move("acme", bolt, since)
    before = list(Report.objects.values())
    moved = move("acme", bolt, since, by=ada, reason="sold in October")
    assert list(Report.objects.values()) == before
    assert (moved.since, moved.adjusted_since) == (NOVEMBER, since)
    assert totals() == {(former.pk, "acme"): 11, (bolt.pk, "acme"): 7}
    assert adjusted() == {(former.pk, "2026-10-01"): -6, (bolt.pk, "2026-09-30"): 6}
    taken, given = Adjustment.objects.order_by("pk")
    assert (taken.account, given.account) == ("acme", "acme")
    assert {taken.author, given.author} == {ada}
    assert taken.reason == "usage of 2026-10 goes with its account text: sold in October"
    close("2026-11-03")
    assert billed() == {(former.token, "2026-10"): 5, (bolt.token, "2026-10"): 6}


def test_the_sentences_about_usage_that_adjustments_move_do_not_contradict_each_other() -> None:
    closed_october()
    bolt = customer("bolt")
    text = said("acme", bolt, at("2026-10-10") // SECOND)
    assert "So usage from 2026-10-10 00:00 UTC until then is moved by adjustments" in text
    assert "Usage of acme from 2026-11-01 00:00 UTC on is counted for this customer." in text
    assert "Usage of before 2026-10-10 00:00 UTC stays with the customer who had the text then." in text
    assert "before 2026-11-01" not in text
    assert "stays with the customer who had" not in said("acme", bolt, 0)


def test_who_has_the_text_already_and_who_has_it_no_longer_is_said(ada: User) -> None:
    former = closed_october()
    bolt = customer("bolt")
    Access.objects.create(target="account:acme", reason="has not paid")
    move("acme", bolt, by=ada)
    text = said("acme", bolt, OCTOBER)
    assert (
        f"Customer {bolt.token} (acme, bolt) has the text already, and now gets usage of before of customer"
        f" {former.token} (no text now)." in text
    )
    for wrong in ("only text", "switch at once", "then has the plan", "stays with its former customer"):
        assert wrong not in text
    assert "Bills: all usage of carl is this customer's." in said("carl", bolt, 0)


def test_usage_on_reports_goes_to_the_same_month_of_a_new_customer(ada: User) -> None:
    former = closed_october()
    new = move("acme", None, 0, by=ada).customer
    assert adjusted() == {(former.pk, "2026-10-01"): -11, (new.pk, "2026-10-01"): 11}
    assert totals() == {(former.pk, "acme"): 11, (new.pk, "acme"): 7}
    close("2026-11-03")
    assert billed() == {(former.token, "2026-10"): 0, (new.token, "2026-10"): 11}


def test_usage_of_an_open_period_goes_into_a_report_of_the_customer_by_an_adjustment(ada: User) -> None:
    """The report of the customer states all its usage, so no usage can be counted into its period again."""
    spend(account("bolt"), "2026-10-05", 9)
    close("2026-11-03")
    bolt = customer("bolt")
    spend("acme", "2026-10-20", 6)
    spend("acme", "2026-11-02", 7)
    flow()
    former = customer("acme")
    moved = move("acme", bolt, OCTOBER, by=ada)
    assert (moved.since, moved.adjusted_since) == (NOVEMBER, OCTOBER)
    assert totals() == {(bolt.pk, "bolt"): 9, (former.pk, "acme"): 6, (bolt.pk, "acme"): 7}
    assert adjusted() == {(former.pk, "2026-10-01"): -6, (bolt.pk, "2026-10-01"): 6}
    close("2026-11-03")
    assert billed() == {(former.token, "2026-10"): 0, (bolt.token, "2026-10"): 15}


def test_adjustments_wait_for_another_person_if_the_settings_say_so(ada: User, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ADJUSTMENT_APPROVAL": True}
    closed_october()
    assert "Another person must approve these adjustments." in said("acme", None, OCTOBER)
    move("acme", None, OCTOBER, by=ada)
    assert {row.approval for row in Adjustment.objects.all()} == {"waiting"}


def test_the_same_usage_is_never_adjusted_twice(ada: User) -> None:
    closed_october()
    second = move("acme", None, OCTOBER, by=ada).customer
    with pytest.raises(NotMovedError, match=f"before 2026-11-01 00:00 UTC to customer {second.token} already"):
        plan("default", "acme", None, OCTOBER).adjusted  # noqa: B018
    with pytest.raises(NotMovedError):
        move("acme", None, OCTOBER, by=ada)
    third = move("acme", None, NOVEMBER, by=ada).customer
    assert totals()[third.pk, "acme"] == 7
    assert Adjustment.objects.count() == 2


def test_a_customer_who_has_a_text_already_can_still_get_its_usage_of_before(ada: User) -> None:
    payer = account()
    spend(payer, "2026-10-05", 5)
    spend(payer, "2026-10-20", 6)
    flow()
    former = customer("acme")
    second = move("acme", None, at("2026-10-10") // SECOND).customer
    close("2026-11-03")
    assert totals() == {(former.pk, "acme"): 5, (second.pk, "acme"): 6}
    names = list(Name.objects.filter(identifier="acme").values())
    planned = plan("default", "acme", second, OCTOBER)
    assert not planned.changes_names
    assert units(planned.adjusted) == [("requests", 5, "2026-10", "2026-10")]
    assert "only adjustments are made" in "\n".join(sentences(planned))
    move("acme", second, OCTOBER, by=ada)
    assert list(Name.objects.filter(identifier="acme").values()) == names
    assert adjusted() == {(former.pk, "2026-10-01"): -5, (second.pk, "2026-10-01"): 5}
    assert totals() == {(former.pk, "acme"): 5, (second.pk, "acme"): 6}
    close("2026-11-03")
    assert billed() == {(former.token, "2026-10"): 0, (second.token, "2026-10"): 11}


def test_a_moment_without_usage_after_it_needs_no_adjustment(ada: User) -> None:
    closed_october()
    planned = plan("default", "acme", None, NOVEMBER - 900)
    assert (planned.since, planned.adjusted) == (NOVEMBER, [])
    assert "so nothing must be adjusted" in "\n".join(sentences(planned))
    moved = move("acme", None, NOVEMBER - 900, by=ada)
    assert (moved.since, moved.adjusted_since) == (NOVEMBER, None)
    assert not Adjustment.objects.exists()


def test_without_the_lines_of_closed_periods_nobody_can_say_what_to_adjust(ada: User) -> None:
    closed_october()
    Line.objects.filter(bin__lt=OCTOBER + 10 * DAY).delete()
    with pytest.raises(NotMovedError, match="are archived, so nobody knows which usage an adjustment must move"):
        move("acme", None, OCTOBER, by=ada)
    assert not Move.objects.exists()


def test_more_units_than_one_adjustment_can_have_become_several(ada: User) -> None:
    closed_october()
    Line.objects.filter(bin__lt=NOVEMBER).update(admitted_units=2**40)
    moved = move("acme", None, OCTOBER, by=ada)
    assert sorted(Adjustment.objects.values_list("quantity", flat=True)) == [-(2**40), -(2**40), 2**40, 2**40]
    assert moved.adjusted_since == OCTOBER


def test_a_move_that_would_do_something_else_than_a_person_has_seen_is_not_made(ada: User) -> None:
    spend("acme", "2026-10-20", 6)
    flow()
    seen = plan("default", "acme", None, OCTOBER)
    spend("acme", "2026-10-21", 6)
    flow()
    assert plan("default", "acme", None, OCTOBER).digest == seen.digest
    close("2026-11-03")
    with pytest.raises(ChangedMeanwhileError):
        move("acme", None, OCTOBER, by=ada, seen=seen.digest)
    seen = plan("default", "acme", None, OCTOBER)
    move("acme", None, OCTOBER, by=ada, seen=seen.digest)
    fresh = plan("default", "nobody-yet", customer("acme"))
    assert move("nobody-yet", customer("acme"), fresh.asked, seen=fresh.digest).kind == "rename"


def test_a_customer_is_found_by_its_texts_and_by_its_token() -> None:
    acme = customer("acme")
    assert find_customer("default", "acme") == find_customer("default", acme.token) == acme
    make_missing("default", [""])
    for typed in ("", "bolt"):
        with pytest.raises(NotMovedError, match="No customer has the account text or the token"):
            find_customer("default", typed)
    make_missing("default", [acme.token])
    with pytest.raises(NotMovedError, match="is the token of one customer and the text of another"):
        find_customer("default", acme.token)


def test_usage_that_no_tally_has_seen_is_listed_as_nobody_s() -> None:
    spend("acme", "2026-11-02", 7)
    seal()
    drain(at("2026-11-03"))
    planned = plan("default", "acme", None, 0)
    assert rows(planned)[0][:4] == ("counted again", "requests", "7", "nobody")
    assert as_json(planned)["usage"][0]["former"] is None
    moved = move("acme", None, 0)
    flow()
    assert totals() == {(moved.customer.pk, "acme"): 7}


def test_a_plan_writes_nothing() -> None:
    planned = plan("default", "acme", customer("bolt"), next_quarter("default"))
    list(sentences(planned))
    assert not Name.objects.filter(identifier="acme").exists()
    assert planned.former is None
