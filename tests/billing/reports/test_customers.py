"""Test bills while account texts go from one customer to another: each customer owes its own, and sees only its own."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from ratelimits.billing.models import Adjustment, PushDelivery, Report, ReportLine
from ratelimits.billing.push.deliveries import plan as plan_deliveries
from ratelimits.billing.push.receivers import receiver
from ratelimits.billing.push.settle import status
from ratelimits.billing.reports.closing.close import finalise, home_shard
from ratelimits.billing.reports.closing.open_periods import force, open_periods
from ratelimits.billing.reports.exports import FORMATS
from ratelimits.billing.reports.statements import columns_of, rows, statements
from ratelimits.billing.reports.statements.charges import charges, lines_for
from ratelimits.billing.reports.statements.effect import effect_of
from ratelimits.models import Account, Customer, Plan
from ratelimits.models.accounts.named import named, named_now
from ratelimits.moments import moment
from ratelimits.usage.alerts.evaluate import evaluate
from ratelimits.usage.customers.move import NotMovedError, move
from ratelimits.usage.ledger import gaps
from ratelimits.usage.models import Alert, AlertChannel, AlertDelivery, GapKind, ShardState
from tests.support.customers import present
from tests.support.reports.edits import edit_at, rename
from tests.support.reports.invoices import account, close, spend
from tests.support.reports.priced import charge, findings
from tests.support.selection import few
from tests.support.usage.traffic import at, flow

pytestmark = pytest.mark.django_db(transaction=True)

#: Bounds of October.
OCTOBER, END = at("2026-10-01"), at("2026-11-01")


@pytest.fixture(params=["version", "period"])
def late_usage(request: pytest.FixtureRequest, settings: Any) -> str:
    """Return each value of LATE_USAGE, and set it."""
    settings.RATELIMITS = {**settings.RATELIMITS, "LATE_USAGE": request.param}
    return str(request.param)


def plans() -> tuple[Plan, Plan]:
    """Make two plans, each by an account of its own without usage: 100 units included; 1 or 2 each, and a fee of 10
    or 20."""
    for number in (1, 2):
        payer = account(f"spare-{number}", included=100)
        Plan.objects.filter(accounts=payer).update(currency="EUR")
        charge(payer, unit_price=str(number), flat_fee=str(10 * number))
    first, second = Plan.objects.order_by("pk")
    return first, second


def sign_up(text: str, plan: Plan, day: str = "") -> Customer:
    """Put an account on a plan, from a day on, and return its customer."""
    if day:
        with edit_at(day):
            Account.objects.create(identifier=text, plan=plan)
    else:
        account(text)
        with edit_at(0):
            Account.objects.filter(identifier=text).update(plan=plan)
    return present("default", [text])[text]


def second(day: str) -> int:
    return at(day) // 10**6


def renamed() -> dict[Customer, int]:
    """The customer of "a" is renamed "x"; another one signs up as "a"."""
    cheap, dear = plans()
    one = sign_up("a", cheap)
    spend("a", "2026-10-05", 150)
    flow()
    rename("a", "x", "2026-10-10")
    spend("x", "2026-10-15", 50)
    two = sign_up("a", dear, "2026-10-12")
    spend("a", "2026-10-15", 10)
    return {one: 110, two: 20}


def swapped() -> dict[Customer, int]:
    """Two customers swap their texts."""
    cheap, dear = plans()
    one, two = sign_up("a", cheap), sign_up("b", dear)
    spend("a", "2026-10-05", 130)
    spend("b", "2026-10-05", 1300)
    flow()
    move("a", two, second("2026-10-10"))
    move("b", one, second("2026-10-10"))
    spend("b", "2026-10-15", 50)
    spend("a", "2026-10-15", 1300)
    return {one: 90, two: 5020}


def taken() -> dict[Customer, int]:
    """A customer is deleted, and another one takes its text."""
    cheap, dear = plans()
    one = sign_up("a", cheap)
    spend("a", "2026-10-05", 150)
    flow()
    with edit_at("2026-10-08"):
        Account.objects.get(identifier="a").delete()
    two = move("a", None, second("2026-10-10")).customer
    with edit_at("2026-10-10"):
        Account.objects.create(identifier="a", plan=dear)
    spend("a", "2026-10-15", 110)
    return {one: 60, two: 40}


def two_texts() -> dict[Customer, int]:
    """A customer has two texts at a time, in two shards."""
    cheap, _dear = plans()
    one = sign_up("a", cheap)
    move("second", one, 0)
    for text in ("a", "second"):
        spend(text, "2026-10-05", 150)
    return {one: 210}


def merged() -> dict[Customer, int]:
    """A customer gets the texts of another one."""
    cheap, dear = plans()
    one, two = sign_up("a", cheap), sign_up("b", dear)
    for text in ("a", "b"):
        spend(text, "2026-10-05", 110)
    flow()
    move("b", one, second("2026-10-10"))
    for text in ("a", "b"):
        spend(text, "2026-10-15", 20)
    return {one: 60, two: 40}


def split() -> dict[Customer, int]:
    """One of the two texts of a customer goes to a new customer."""
    cheap, dear = plans()
    one = sign_up("a", cheap)
    move("b", one, 0)
    for text in ("a", "b"):
        spend(text, "2026-10-05", 110)
    flow()
    two = move("b", None, second("2026-10-10")).customer
    with edit_at("2026-10-10"):
        Account.objects.create(identifier="b", plan=dear)
    spend("a", "2026-10-15", 20)
    spend("b", "2026-10-15", 120)
    return {one: 150, two: 60}


SCENARIOS = pytest.mark.parametrize(
    "scenario", few([renamed, swapped, taken, two_texts, merged, split], renamed, merged)
)


def owed(reports: list[Report]) -> dict[str, Fraction]:
    """Return what each customer owes, by token."""
    found: Counter[str] = Counter()
    for report in reports:
        for period in report.amounts.get("periods", {}).values():
            found[report.customer_id] += Fraction(period["amount"])  # type: ignore[assignment]
    return dict(found)  # type: ignore[arg-type]


@SCENARIOS
def test_each_customer_owes_its_own_on_one_report(scenario: Callable[[], dict[Customer, int]], late_usage: str) -> None:
    expected = {customer.token: owes for customer, owes in scenario().items()}
    flow()
    drafts = {each.report.customer_id: each.report for each in statements("2026-10")}
    provisional: Counter[str] = Counter()
    for charged in charges(statements("2026-10")):
        provisional[charged.row.report_id.partition(".")[0]] += charged.amount or 0  # type: ignore[assignment]
    assert provisional == expected
    reports = close("2026-11-02")
    assert sorted(report.customer_id for report in reports) == sorted(expected)
    assert owed(reports) == expected
    assert {report.customer_id: report.included for report in reports} == {
        token: draft.included for token, draft in drafts.items()
    }
    accounts = {
        customer.token: customer.account for customer in named("default", Customer.objects.values_list("pk", flat=True))
    }
    assert {report.customer_id: report.account for report in reports} == {token: accounts[token] for token in expected}
    assert Counter(ReportLine.objects.values_list("line_id", flat=True)).most_common(1)[0][1] == 1
    assert findings() == ""


@SCENARIOS
def test_late_usage_is_billed_to_the_customer_of_its_time(
    scenario: Callable[[], dict[Customer, int]], late_usage: str
) -> None:
    expected = {customer.token: Fraction(owes) for customer, owes in scenario().items()}
    close("2026-11-02")
    one = Customer.objects.get(pk=min(customer.pk for customer in Customer.objects.filter(token__in=expected)))
    spend("a", "2026-10-05", 7)  # when "a" was the text of the first customer
    texts = [name.text for name in named("default", [one.pk])[0].names if name.until is None]
    for text in texts:
        spend(text, "2026-11-05", 1)
    reports = close("2026-11-03") if late_usage == "version" else close("2026-12-02")
    (late,) = (report for report in reports if report.customer_id == one.token)
    assert (late.label, late.version) == (("2026-11", 1) if late_usage == "period" and texts else ("2026-10", 2))
    october = str(OCTOBER // 10**6)
    amounts = [
        Fraction(report.amounts["periods"][october]["amount"])
        for report in Report.objects.filter(customer__token=one.token)
        if october in report.amounts.get("periods", {})
    ]
    assert sum(amounts) == expected[one.token] + 7
    assert findings() == ""


@SCENARIOS
def test_nobody_sees_the_report_of_another(
    scenario: Callable[[], dict[Customer, int]], client: Client, late_usage: str
) -> None:
    expected = {customer.token for customer in scenario()}
    flow()

    def seen(text: str) -> set[str]:
        user, _made = get_user_model().objects.get_or_create(username=text)
        client.force_login(user)
        asked = named_now("default", [text])[text].token
        found = {row.report_id.partition(".")[0] for row in rows(statements("2026-10", account=text))}
        assert found <= {asked}
        assert {each.token for each in open_periods(account=text, running=True)} <= {asked}
        return found

    texts = {name.text for one in named("default", Customer.objects.values_list("pk", flat=True)) for name in one.names}
    before = {text: seen(text) for text in texts}
    close("2026-11-02")
    assert {text: seen(text) for text in texts} == before
    assert set().union(*before.values()) <= expected


def test_a_customer_downloads_its_own_report_under_all_its_texts_and_a_successor_none(
    client: Client, settings: Any
) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": lambda request: request.user.username}
    spend("a", "2026-10-05", 150)
    flow()
    close("2026-11-02")
    rename("a", "x", "2026-11-10")

    def downloaded(text: str) -> list[tuple[str, str]]:
        client.force_login(get_user_model().objects.get_or_create(username=text)[0])
        response: Any = client.get("/usage/report/", {"period": "2026-10"})
        content = b"".join(response.streaming_content).decode()
        return [(row["account"], row["consumed_quantity"]) for row in csv.DictReader(io.StringIO(content))]

    assert downloaded("x") == [("a", "150")]
    assert downloaded("a") == []


def test_the_lists_of_the_admin_find_a_customer_by_its_present_text(admin_client: Client) -> None:
    spend("a", "2026-10-05", 150)
    close("2026-11-02")
    (report,) = Report.objects.all()
    rename("a", "x", "2026-11-10")
    spend("x", "2026-11-12", 7)
    flow()
    for query in ("q=x", "q=a", f"customer={report.customer_id}"):
        page = admin_client.get(f"/admin/ratelimits_billing/report/?{query}").content.decode()
        assert f"/admin/ratelimits_billing/report/{report.pk}/change/" in page, query
    page = admin_client.get("/admin/ratelimits_billing/report/open/?running=1&account=x").content.decode()
    assert "7 requests" in page
    page = admin_client.get("/admin/ratelimits_billing/report/open/?running=1&account=a").content.decode()
    assert "7 requests" not in page


@pytest.mark.parametrize("billed_as", ["x", ""])
def test_a_billing_system_gets_the_present_text_of_the_customer_and_never_that_of_a_successor(
    billed_as: str, settings: Any
) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "PUSH": {"stripe": {"KEY": "sk_test", "SINCE": "2026-10"}}}
    spend("a", "2026-10-05", 150)
    close("2026-11-02")
    if billed_as:
        rename("a", "x", "2026-11-10")
    else:
        move("a", None, second("2026-11-10"))
    stripe = receiver("stripe")
    plan_deliveries(stripe)
    delivery = PushDelivery.objects.get()
    assert (delivery.customer, delivery.state) == (billed_as, "waiting" if billed_as else "skipped")
    without = status(stripe, moment(at("2026-11-12"))).without_account
    assert [tuple(each) for each in without] == ([] if billed_as else [("a", 1, 150)])
    exported = b"".join(FORMATS["stripe"].stream(lines_for(FORMATS["stripe"], statements("2026-10")))).decode()
    assert ('"stripe_customer_id":"x"' in exported) == bool(billed_as)
    assert '"stripe_customer_id":"a"' not in exported
    assert findings() == ""


def test_two_reports_with_one_text_are_two_customers_in_each_file() -> None:
    cheap, dear = plans()
    sign_up("a", cheap)
    spend("a", "2026-10-05", 150)
    close("2026-11-02")
    two = move("a", None, second("2026-11-01")).customer
    with edit_at("2026-11-01"):
        Account.objects.create(identifier="a", plan=dear, billing_anchor="2026-01-15T00:00")
    with edit_at("2026-11-01"):
        Account.objects.filter(identifier="a").update(timezone="America/New_York")
    spend("a", "2026-11-02", 110)
    reports = [*Report.objects.all(), *close("2026-11-20")]
    assert [(report.account, report.customer_id == two.token) for report in reports] == [("a", False), ("a", True)]
    version = columns_of("2026-10")
    form = FORMATS["focus"]
    found: Counter[str] = Counter()
    for month in ("2026-10", "2026-11"):
        content = b"".join(form.stream(lines_for(form, statements(month)), version)).decode()
        for row in csv.DictReader(io.StringIO(content)):
            found[row["BillingAccountId"]] += Fraction(row["BilledCost"])  # type: ignore[assignment]
    assert found == owed(reports)
    assert findings() == ""


def test_two_texts_of_one_customer_have_one_alert_and_one_channel(settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ALERT_THRESHOLDS": [100]}
    row = account("a", included=100)
    channel = AlertChannel.objects.create(account=row, email="ada@example.com")
    one = present("default", ["a"])["a"]
    move("second", one, 0)
    evaluate(at("2026-11-01"))
    for text in ("a", "second"):
        spend(text, "2026-11-05", 60)
    flow()
    evaluate(at("2026-11-06"))
    evaluate(at("2026-11-06"))  # when both shards are known
    (alert,) = Alert.objects.all()
    assert (alert.customer, alert.account, alert.used, alert.quantity) == (one, "a", 120, 100)
    assert AlertDelivery.objects.filter(channel=channel).count() == 1


def test_a_successor_gets_no_alert_for_usage_of_before(settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ALERT_THRESHOLDS": [100]}
    account("a", included=100)
    spend("a", "2026-11-05", 1)
    flow()
    evaluate(at("2026-11-05"))
    spend("a", "2026-11-06", 150)
    flow()
    one = present("default", ["a"])["a"]
    rename("a", "x", "2026-11-10")
    two = present("default", ["a"])["a"]
    with edit_at("2026-11-10"):
        Account.objects.create(identifier="a", plan=Account.objects.get(identifier="x").plan)
    spend("a", "2026-11-12", 10)
    flow()
    evaluate(at("2026-11-13"))
    assert [(alert.customer, alert.account) for alert in Alert.objects.all()] == [(one, "x")]
    spend("a", "2026-11-12", 90)
    flow()
    evaluate(at("2026-11-13"))
    assert set(Alert.objects.values_list("customer", "account", "used")) == {(one.pk, "x", 151), (two.pk, "a", 100)}


def test_an_adjustment_is_of_the_customer_whom_the_text_names_and_finds_a_former_one_too() -> None:
    cheap, dear = plans()
    one = sign_up("a", cheap)
    spend("a", "2026-10-05", 150)
    close("2026-11-02")
    rename("a", "x", "2026-11-10")
    two = sign_up("a", dear, "2026-11-10")
    author = get_user_model().objects.create(username="finance")
    about = {"period_start": moment(OCTOBER), "author": author, "reason": "a credit"}
    adjustment = Adjustment(account="x", quantity=-10, **about)
    adjustment.full_clean(exclude=["author"])
    effect = effect_of(adjustment)
    assert (effect.version, effect.before.overage, effect.after.overage) == (1, 50, 40)
    adjustment.save()
    Adjustment.objects.create(account="a", quantity=-5, **about)  # the text of then
    assert set(Adjustment.objects.values_list("customer", flat=True)) == {one.pk}
    (second_version,) = close("2026-11-12")
    assert (second_version.customer_id, second_version.account, second_version.version) == (one.token, "x", 2)
    assert owed(list(Report.objects.all())) == {one.token: 45}
    running = Adjustment.objects.create(account="a", quantity=5, **{**about, "period_start": moment(at("2026-11-15"))})
    assert running.customer_id == two.pk
    assert findings() == ""


def test_a_gap_is_on_the_report_of_the_customer_of_its_time() -> None:
    spend("a", "2026-10-05", 3)
    flow()
    one = present("default", ["a"])["a"]
    rename("a", "x", "2026-10-10")
    two = present("default", ["a"])["a"]
    spend("a", "2026-10-15", 4)
    gaps.declare("default", GapKind.UNMETERED, "1", account="a", since=at("2026-10-06"), until=at("2026-10-07"))
    reports = {report.customer_id: report for report in close("2026-11-02")}
    assert ("unmetered" in reports[one.token].gaps, "unmetered" in reports[two.token].gaps) == (True, False)
    gaps.declare("default", GapKind.UNMETERED, "2", account="a", since=at("2026-10-16"), until=at("2026-10-17"))
    (version,) = close("2026-11-03")
    assert (version.customer_id, version.version) == (two.token, 2)
    assert findings() == ""


def test_a_period_that_is_closed_by_force_says_so_on_no_other_customer_s_report() -> None:
    spend("a", "2026-10-05", 3)
    flow()
    one = present("default", ["a"])["a"]
    move("a", None, second("2026-10-10"))
    spend("a", "2026-10-15", 4)
    flow()
    report = force(one.token, OCTOBER, "ada", "due", at("2026-11-02"))
    (other,) = close("2026-11-02")
    assert ("forced" in report.gaps, "forced" in other.gaps) == (True, False)
    assert (report.account, other.account) == ("a", "a")
    assert findings() == ""


def test_no_usage_is_moved_into_a_period_whose_report_has_adjustments_alone() -> None:
    one = Account.objects.create(identifier="a")
    author = get_user_model().objects.create(username="finance")
    about = {"account": "a", "period_start": moment(OCTOBER), "author": author, "reason": "a fee"}
    Adjustment.objects.create(quantity=5, **about)
    spend(account("b", billing_anchor="2026-01-15T00:00"), "2026-10-20", 3)
    flow()
    ShardState.objects.get_or_create(shard=home_shard("a"))
    (report,) = close("2026-11-02")
    customer = Customer.objects.get(token=report.customer_id)
    assert report.account == one.identifier
    with pytest.raises(NotMovedError, match="2026-11-01"):
        move("b", customer, second("2026-10-18"))
    move("b", customer, second("2026-11-01"))
    spend("b", "2026-11-03", 4)
    flow()
    assert findings() == ""
    reports = close("2026-12-02")
    billed = {report.account: sum(line.consumed_quantity for line in report.lines.all()) for report in reports}
    assert billed == {"a": 4, "b": 3}
    assert findings() == ""


def test_a_period_has_the_plan_of_its_time_also_if_the_customer_has_another_text_when_it_is_closed() -> None:
    account("a", included=100)
    spend("a", "2026-10-05", 150)
    flow()
    rename("a", "x", "2026-11-01T06:00")
    (report,) = close("2026-11-02")
    assert (report.account, report.plan, report.included) == ("x", "plan-a", {"requests": 100})
    assert findings() == ""


def test_a_period_waits_for_the_shards_of_all_texts_of_its_customer() -> None:
    two_texts()
    flow()
    assert home_shard("a") != home_shard("second")
    ShardState.objects.update(watermark=at("2026-11-02"))
    ShardState.objects.filter(shard=home_shard("second")).update(watermark=at("2026-10-20"))
    assert finalise(at("2026-11-02")) == []
    (waiting,) = open_periods(at("2026-11-02"), account="a")
    assert f"shard {home_shard('second'):02d}" in waiting.why
    ShardState.objects.update(watermark=at("2026-11-02"))
    assert len(finalise(at("2026-11-02"))) == 1
