"""Test adjustments in the admin: shown before they are saved, and approved by another person if a setting says so."""

from __future__ import annotations

import re
from decimal import Decimal
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import Permission, User
from django.db import IntegrityError, transaction
from django.test import Client, override_settings

from ratelimits.billing.admin.adjustments import AdjustmentAdmin
from ratelimits.billing.models import Adjustment, Report
from ratelimits.billing.reports.adjusting import NotDecidedError, approve
from ratelimits.billing.reports.closing.close import home_shard
from ratelimits.billing.reports.closing.open_periods import open_periods
from ratelimits.billing.reports.statements import rows, statements
from ratelimits.billing.reports.statements.effect import AmountOwed, Effect, Quantities, effect_of
from ratelimits.models import Account
from ratelimits.usage.models import ShardState
from tests.admin.test_usage import text, url
from tests.billing.reports.closing.test_close import adjust
from tests.support.reports.edits import rename
from tests.support.reports.invoices import account, close, spend
from tests.support.reports.priced import charge, priced
from tests.support.usage.traffic import at, flow

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]

ADD = "/admin/ratelimits_billing/adjustment/add/"


@pytest.fixture
def used(fsync_at_once: None) -> None:
    """Add 50 requests in October, by an account whose plan includes 40."""
    spend(account(included=40), "2026-10-15", 50)
    flow()


@pytest.fixture
def _approved(settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ADJUSTMENT_APPROVAL": True}


def typed(**values: str) -> dict[str, str]:
    start = {"period_start_0": "2026-10-01", "period_start_1": "00:00:00"}
    return {"account": "acme", **start, "meter": "requests", "quantity": "-20", "reason": "goodwill", **values}


def sent_again(page: Any, **more: str) -> dict[str, str]:
    """Return the form that a browser posts from the page that shows the effect."""
    fields = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', page.content.decode())
    return {name: unescape(value) for name, value in fields if name != "csrfmiddlewaretoken"} | more


def staff(name: str, *permissions: str) -> User:
    user = User.objects.create(username=name, is_staff=True)
    for permission in ("view", *permissions):
        user.user_permissions.add(Permission.objects.get(codename=f"{permission}_adjustment"))
    return user


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize("closed", [False, True])
def test_what_an_adjustment_makes_of_the_report_is_shown_before_it_is_saved(admin_client: Client, closed: bool) -> None:
    if closed:
        close("2026-11-02")
    page = admin_client.post(ADD, typed(_save="Save", key="api_key:<1>"))
    assert not Adjustment.objects.exists()
    assert page.context["effect"] == Effect(50, int(closed), -20, Quantities(40, 10), Quantities(30, 0))
    assert "The adjustment is -20 units: 40 % of the 50 units that were used." in text(page)
    assert ("The period is closed" in text(page)) == closed
    assert admin_client.post(ADD, sent_again(page)).status_code == 302
    made = Adjustment.objects.get()
    assert (made.quantity, made.key, made.approval) == (-20, "api_key:<1>", "unasked")
    saved = text(admin_client.get(url(Adjustment, "change", made.pk)))
    assert "before the adjustment, 50 units are billed (10 of them overage)" in saved
    assert "after the adjustment, 30 units are billed (0 of them overage); 50 units were used" in saved


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("quantity", ["-99999999", "51"])
def test_more_than_all_that_was_used_is_asked_for_once_more(admin_client: Client, quantity: str, closed: bool) -> None:
    if closed:
        close("2026-11-02")
    page = admin_client.post(ADD, typed(quantity=quantity))
    assert "adjust by more units than were used" in text(page)
    again = admin_client.post(ADD, sent_again(page))
    assert "Tick the box to confirm." in text(again)
    assert not Adjustment.objects.exists()
    assert admin_client.post(ADD, sent_again(again, _large_meant="1")).status_code == 302
    assert Adjustment.objects.get().quantity == int(quantity)


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize("quantity", ["9223372036854775807", f"{-(2**40) - 1}"])
def test_more_than_any_usage_can_be_is_refused(admin_client: Client, quantity: str) -> None:
    page = admin_client.post(ADD, typed(quantity=quantity))
    assert page.context["adminform"].form.errors["quantity"] == [
        "An adjustment can be of at most 1,099,511,627,776 units."
    ]


@pytest.mark.parametrize("day", ["0001-01-01", "0001-02-01", "9999-12-01", "9999-12-31"])
def test_a_period_at_the_end_of_the_calendar_is_an_error_at_its_field(admin_client: Client, day: str) -> None:
    account(timezone="Pacific/Kiritimati", billing_anchor="2026-01-15T06:00")
    page = admin_client.post(ADD, typed(period_start_0=day))
    assert page.context["adminform"].form.errors["period_start"]


def test_the_moment_of_an_error_can_be_typed(admin_client: Client) -> None:
    """Adjust, in a project in Tokyo, an account in New York: all moments are in the zone in which they are typed."""
    account(timezone="America/New_York")
    with override_settings(TIME_ZONE="Asia/Tokyo"):
        help_text = text(admin_client.get(ADD))
        assert "In the time zone Asia/Tokyo." in help_text
        page = admin_client.post(ADD, typed())
        (error,) = page.context["adminform"].form.errors["period_start"]
        (day, time, zone) = re.findall(r"starts at ([\d-]+) ([\d:]+) (\S+)\.", error)[0]
        assert (day, time, zone) == ("2026-09-01", "13:00:00", "Asia/Tokyo")
        page = admin_client.post(ADD, typed(period_start_0=day, period_start_1=time))
        assert "2026-09-01 13:00 JST" in text(page)
        assert admin_client.post(ADD, sent_again(page, _large_meant="1")).status_code == 302
        for far in ("0001-01-01", "9999-12-31"):
            assert admin_client.post(ADD, typed(period_start_0=far)).context["adminform"].form.errors["period_start"]
    assert Adjustment.objects.get().period_start.isoformat() == "2026-09-01T04:00:00+00:00"


@pytest.mark.parametrize(
    ("quantity", "used", "percent"),
    [
        (-63, 250, "25.2"),
        (20, 50, "40"),
        (-1, 3, "≈ 33.33"),
        (2, 3, "≈ 66.67"),
        (1, 1_000_000, "0.0001"),
        (1, 3_000_000, "≈ 0.00003333"),
        (2**40, 7, "≈ 15707308968228.57"),
        (1, 0, None),
    ],
)
def test_the_share_of_an_adjustment_is_exact_or_says_that_it_is_not(
    quantity: int, used: int, percent: str | None
) -> None:
    assert Effect(used, 1, quantity, Quantities(0, 0), Quantities(0, 0)).percent == percent


@pytest.mark.usefixtures("used")
def test_where_nothing_was_used_any_adjustment_is_large(admin_client: Client) -> None:
    account("idle")
    page = admin_client.post(ADD, typed(account="idle", quantity="1"))
    assert "The adjustment is 1 units, in a period without usage." in text(page)
    assert page.context["effect"].is_large


@pytest.mark.usefixtures("used")
@pytest.mark.parametrize("closed", [False, True])
def test_an_effect_comes_after_the_adjustments_that_count_already(closed: bool) -> None:
    if closed:
        close("2026-11-02")
    first, second = adjust(-15), adjust(-20)
    assert effect_of(first).before == Quantities(30, 0)
    found = effect_of(second)
    assert (found.used, found.before, found.after) == (50, Quantities(35, 0), Quantities(15, 0))
    written = close("2026-11-03")
    assert sum(line.included_quantity for report in written for line in report.lines.all()) == (-25 if closed else 15)


@pytest.mark.parametrize("closed", [False, True])
def test_the_page_says_what_is_owed_before_and_after(admin_client: Client, closed: bool) -> None:
    acme = priced(included=40, unit_price="0.105", flat_fee="10", minimum="10.50")
    charge(acme, meter="tokens", unit_price="1")
    spend(acme, "2026-10-15", 50)
    spend(acme, "2026-10-16", 2, meter="tokens")
    flow()
    if closed:
        close("2026-11-02")
    adjust(1)
    page = admin_client.post(ADD, typed())
    assert page.context["effect"].owed == AmountOwed("EUR", Decimal("13.16"), Decimal("12.50"))  # 11, 0 beyond 40
    assert "13.16 EUR" in text(page)
    assert "12.50 EUR" in text(page)
    admin_client.post(ADD, sent_again(page))
    made = Adjustment.objects.get(quantity=-20)
    assert "owed for the period: 13.16 EUR before, 12.50 EUR after" in text(
        admin_client.get(url(Adjustment, "change", made.pk))
    )
    written = close("2026-11-03")
    assert written[-1].amounts["total"] == {"EUR": "12.50"}


def test_in_a_period_without_usage_an_adjustment_makes_a_report_with_its_fees(admin_client: Client) -> None:
    priced(flat_fee="10", minimum="10.50")
    page = admin_client.post(ADD, typed(quantity="1"))
    assert page.context["effect"].owed == AmountOwed("EUR", Decimal(0), Decimal("10.50"))
    admin_client.post(ADD, sent_again(page, _large_meant="1"))
    ShardState.objects.get_or_create(shard=home_shard("acme"))
    (report,) = close("2026-11-02")
    assert report.amounts["total"] == {"EUR": "10.50"}


def test_what_is_owed_under_all_texts_of_a_customer_is_shown(admin_client: Client) -> None:
    acme = priced(included=5, flat_fee="10")
    spend(acme, "2026-10-10", 12)
    flow()
    rename("acme", "initech", "2026-10-20")
    spend("initech", "2026-10-25", 9)
    (report,) = close("2026-11-02")
    before = Decimal(report.amounts["total"]["EUR"])
    page = admin_client.post(ADD, typed(quantity="-3", account="initech"))
    assert page.context["effect"].owed == AmountOwed("EUR", before, before - Decimal("0.30"))


def test_late_usage_of_another_period_on_the_report_is_not_taken_for_its_own(settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "LATE_USAGE": "period"}
    acme = account(included=40)
    spend(acme, "2026-10-15", 30)
    close("2026-11-02")
    spend(acme, "2026-10-15", 20)
    spend(acme, "2026-11-15", 35)
    (november,) = close("2026-12-02")
    assert november.lines.count() == 2
    made = adjust(10, "2026-11-01")
    found = effect_of(made)
    assert (found.used, found.before, found.after) == (35, Quantities(35, 0), Quantities(40, 5))
    (second,) = close("2026-12-03")
    line = second.lines.get()
    assert (line.included_quantity, line.overage_quantity) == (5, 5)


@pytest.mark.usefixtures("used")
def test_a_page_that_is_sent_twice_saves_one_adjustment(admin_client: Client) -> None:
    page = admin_client.post(ADD, typed())
    sent = sent_again(page)
    for _time in range(2):
        assert admin_client.post(ADD, sent).status_code == 302
    made = Adjustment.objects.get()
    assert str(made.reference) == sent["_reference"]
    assert "The adjustment was already saved: -20 requests for acme." in text(admin_client.post(ADD, sent, follow=True))
    # A form that is opened again makes another adjustment.
    assert admin_client.post(ADD, sent_again(admin_client.post(ADD, typed()))).status_code == 302
    assert Adjustment.objects.count() == 2


@pytest.mark.usefixtures("used")
def test_a_page_that_is_sent_twice_at_once_saves_one_adjustment(admin_client: Client, monkeypatch: Any) -> None:
    sent = sent_again(admin_client.post(ADD, typed()))
    look = AdjustmentAdmin._effect_page

    def overtaken(self: AdjustmentAdmin, request: Any, adjustment: Adjustment) -> Any:
        """Let another request finish after this one has read and before it saves."""
        found = look(self, request, adjustment)
        monkeypatch.setattr(AdjustmentAdmin, "_effect_page", look)
        assert admin_client.post(ADD, sent).status_code == 302
        return found

    monkeypatch.setattr(AdjustmentAdmin, "_effect_page", overtaken)
    assert "The adjustment was already saved" in text(admin_client.post(ADD, sent, follow=True))
    assert Adjustment.objects.count() == 1


@pytest.mark.usefixtures("used")
def test_an_adjustment_of_an_open_period_waits_for_it(admin_client: Client) -> None:
    page = admin_client.post(ADD, typed())
    assert admin_client.post(ADD, sent_again(page)).status_code == 302
    ShardState.objects.update(watermark=at("2026-10-20"))
    action = {"action": "finalise", "_selected_action": [Adjustment.objects.get().pk]}
    assert "waits until its period is closed" in text(admin_client.post(url(Adjustment), action, follow=True))


@pytest.mark.usefixtures("used", "_approved")
def test_an_adjustment_counts_when_another_person_has_approved_it(client: Client) -> None:
    ada, bob, cyd = staff("ada", "add", "change"), staff("bob", "change"), staff("cyd", "add")
    client.force_login(ada)
    page = client.post(ADD, typed())
    assert "Reports do not include the adjustment until another person has approved it." in text(page)
    assert "Reports do not include the adjustment until another person has approved it." in text(
        client.post(ADD, sent_again(page), follow=True)
    )
    made = Adjustment.objects.get()
    assert (made.author, made.approval) == (ada, "waiting")
    (found,) = open_periods(at("2026-11-02"))
    assert found.units == {"requests": 50}
    assert [row.consumed_quantity for row in rows(statements("2026-10"))] == [50]
    (first,) = close("2026-11-02")
    assert first.lines.count() == 1

    def take(name: str) -> str:
        return text(client.post(url(Adjustment), {"action": name, "_selected_action": [made.pk]}, follow=True))

    assert "your own: another person must approve or refuse it" in take("approve")
    assert "waits for approval" not in take("finalise"), "this needs its own permission"
    ada.user_permissions.add(Permission.objects.get(codename="finalise"))
    assert "waits for approval" in take("finalise")
    client.force_login(cyd)
    take("approve")
    made.refresh_from_db()
    assert made.approval == "waiting"
    assert close("2026-11-03") == []
    client.force_login(bob)
    assert "approved" in take("approve")
    made.refresh_from_db()
    assert (made.approval, made.decided_by) == ("approved", bob)
    assert made.decided_at is not None
    assert LogEntry.objects.get(user=bob).change_message == "approved"
    assert "bob" in text(client.get(url(Adjustment, "change", made.pk)))
    assert "does not wait for approval" in take("refuse")
    (second,) = close("2026-11-04")
    assert (second.version, second.lines.get().consumed_quantity) == (2, -20)


@pytest.mark.usefixtures("used")
def test_adjustments_are_found_by_account_by_its_name_and_by_the_reason(admin_client: Client) -> None:
    Account.objects.update(name="Acme Ltd")
    page = admin_client.post(ADD, typed(reason="goodwill after the outage"))
    admin_client.post(ADD, sent_again(page))
    for term, count in (("acme", 1), ("acme ltd", 1), ("the goodwill", 1), ("ltd", 0)):
        assert admin_client.get(url(Adjustment), {"q": term}).context["cl"].result_count == count, term


@pytest.mark.usefixtures("used", "_approved")
def test_a_refused_adjustment_never_counts(client: Client) -> None:
    made = adjust(-20)
    client.force_login(staff("bob", "change"))
    action = {"action": "refuse", "_selected_action": [made.pk]}
    assert "refused" in text(client.post(url(Adjustment), action, follow=True))
    (report,) = close("2026-11-02")
    assert report.lines.count() == 1
    with pytest.raises(NotDecidedError, match="does not wait"):
        approve(made, User.objects.create(username="cyd"))


@pytest.mark.usefixtures("used")
def test_the_setting_counts_when_an_adjustment_is_made(settings: Any) -> None:
    adjust(-20)
    settings.RATELIMITS = {**settings.RATELIMITS, "ADJUSTMENT_APPROVAL": True}
    adjust(-5)
    (report,) = close("2026-11-02")
    assert [line.consumed_quantity for line in report.lines.order_by("number")] == [50, -20]


@pytest.mark.usefixtures("used", "_approved")
def test_the_database_refuses_an_approval_by_the_author_and_a_report_without_approval() -> None:
    made = adjust(-20)
    (report,) = close("2026-11-02")
    for wrong in ({"approval": "approved", "decided_by": made.author}, {"report": report}):
        with pytest.raises(IntegrityError), transaction.atomic():
            Adjustment.objects.filter(pk=made.pk).update(**wrong)
    assert Report.objects.count() == 1
