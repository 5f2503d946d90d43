"""Test that used billing periods keep their starts and ends, however the terms of their accounts change."""

from __future__ import annotations

import pytest
from django.contrib.auth import get_user_model
from django.core.exceptions import ValidationError
from django.db.models import QuerySet

from ratelimits.billing.models import Adjustment, Report
from ratelimits.billing.reports.closing.open_periods import open_periods
from ratelimits.billing.reports.statements import statements
from ratelimits.billing.verification import Verification
from ratelimits.models import Account, FrozenPeriod, versions
from ratelimits.moments import moment
from ratelimits.rules.loader import Loader
from ratelimits.usage.models import PeriodUsage
from ratelimits.usage.periods import iso
from tests.support.reports.edits import edit_at, spend
from tests.support.reports.invoices import account, close
from tests.support.usage.traffic import at, flow, use


@pytest.mark.django_db(transaction=True)
class TestEdits:
    def test_an_adjustment_is_of_one_of_the_account_s_own_periods(self) -> None:
        account(included=100)
        spend("acme", "2026-10-10", 80)
        flow()
        with edit_at("2026-10-20"):
            Account.objects.filter(identifier="acme").update(billing_anchor="2026-01-15T00:00")

        def check(day: str) -> None:
            Adjustment(account="acme", period_start=moment(at(day)), quantity=1, reason="goodwill").clean()

        for day, around in (("2026-10-15", "2026-10-01"), ("2026-11-10", "2026-11-01"), ("2026-12-01", "2026-11-15")):
            with pytest.raises(
                ValidationError, match=f"The period that contains this moment starts at {around} 00:00:00 UTC"
            ):
                check(day)
        for day in ("2026-10-01", "2026-11-01", "2026-11-15"):
            check(day)
        QuerySet(Account).update(timezone="Mars/Olympus")
        check("2026-12-01")  # with an unknown time zone, periods are months in UTC

    @pytest.mark.parametrize(
        ("fields", "following"),
        [
            ({"timezone": "Europe/Berlin"}, ("2026-11-01T00:00:00Z", "2026-11-30T23:00:00Z")),
            ({"timezone": "America/New_York"}, ("2026-11-01T00:00:00Z", "2026-12-01T05:00:00Z")),
            ({"billing_anchor": "2026-01-15T00:00"}, ("2026-11-01T00:00:00Z", "2026-11-15T00:00:00Z")),
            ({"billing_anchor": "2026-01-02T00:00"}, ("2026-11-01T00:00:00Z", "2026-12-02T00:00:00Z")),
        ],
    )
    def test_new_terms_begin_where_the_used_period_ends(
        self, fields: dict[str, str], following: tuple[str, str]
    ) -> None:
        account(included=100)
        spend("acme", "2026-10-10", 80)
        flow()
        with edit_at("2026-10-20"):
            Account.objects.filter(identifier="acme").update(**fields)
        spend("acme", "2026-10-25", 20)
        spend("acme", "2026-11-10", 7)
        reports = close("2027-01-05")
        assert [(iso(each.period_start), iso(each.period_end)) for each in reports] == [
            ("2026-10-01T00:00:00Z", "2026-11-01T00:00:00Z"),
            following,
        ]
        assert [sum(line.included_quantity for line in each.lines.all()) for each in reports] == [100, 7]

    def test_two_changes_of_zone_make_no_period_that_starts_after_it_ends(self) -> None:
        account()
        spend("acme", "2026-10-10")
        flow()
        for day, zone in (("12", "Pacific/Kiritimati"), ("13", "Pacific/Pago_Pago"), ("14", "Europe/Berlin")):
            with edit_at(f"2026-10-{day}"):
                Account.objects.filter(identifier="acme").update(timezone=zone)
            spend("acme", f"2026-10-{day}T12:00")
            flow()
        (report,) = close("2026-12-05")
        assert (iso(report.period_start), iso(report.period_end)) == ("2026-10-01T00:00:00Z", "2026-11-01T00:00:00Z")
        assert sum(line.consumed_quantity for line in report.lines.all()) == 4

    def test_a_name_that_no_account_has_any_more_keeps_its_periods(self) -> None:
        acme = account(included=100, timezone="Europe/Berlin", billing_anchor="2026-01-15T00:00")
        spend("acme", "2026-10-20", 80)
        flow()
        with edit_at("2026-10-25"):
            acme.delete()
        spend("acme", "2026-10-28", 5)
        flow()
        (usage,) = PeriodUsage.objects.all()
        assert (usage.period, usage.period_end) == (at("2026-10-14T22:00") // 10**6, at("2026-11-14T23:00") // 10**6)

    def test_usage_before_there_was_an_account_keeps_its_month(self) -> None:
        spend("acme", "2026-10-10")
        flow()
        with edit_at("2026-10-20"):
            Account.objects.create(identifier="acme", timezone="Asia/Kolkata", billing_anchor="2026-01-20T00:00")
        spend("acme", "2026-10-21")
        spend("acme", "2026-11-02")
        reports = close("2027-01-05")
        assert [(iso(each.period_start), iso(each.period_end)) for each in reports] == [
            ("2026-10-01T00:00:00Z", "2026-11-01T00:00:00Z"),
            ("2026-11-01T00:00:00Z", "2026-11-19T18:30:00Z"),
        ]

    def test_terms_of_an_account_without_usage_change_at_once(self) -> None:
        with edit_at("2026-10-20"):
            Account.objects.create(identifier="acme")
            Account.objects.filter(identifier="acme").update(timezone="Europe/Berlin")
        assert not FrozenPeriod.objects.exists()
        spend("acme", "2026-10-21")
        (report,) = close("2026-11-05")
        assert (iso(report.period_start), iso(report.period_end)) == ("2026-09-30T22:00:00Z", "2026-10-31T23:00:00Z")

    def test_a_process_that_holds_the_rules_learns_of_it(self) -> None:
        account()
        now = at("2026-10-21")
        loader = Loader(lambda: now)
        before = loader.current().billing("account:acme").boundaries
        use("acme", now=now, configuration=versions.ConfigVersion.read("default")[0])
        flow()
        with edit_at("2026-10-20"):
            Account.objects.filter(identifier="acme").update(timezone="Asia/Kolkata")
        held = loader.reload().billing("account:acme")
        assert held.boundaries[1:3] == before[1:3] == held.frozen[-1]

    def test_a_process_that_starts_in_the_next_month_knows_where_the_frozen_period_ends(self) -> None:
        account()
        spend("acme", "2026-10-10")
        flow()
        with edit_at("2026-10-20"):
            Account.objects.filter(identifier="acme").update(billing_anchor="2026-01-15T00:00")
        now = at("2026-11-05")
        found = Loader(lambda: now).current().billing("account:acme").boundaries
        assert found[1:3] == (at("2026-11-01"), at("2026-11-15"))

    def test_an_edit_freezes_the_months_without_usage_too(self) -> None:
        account()
        spend("acme", "2026-06-10")
        flow()
        with edit_at("2026-10-20"):
            Account.objects.filter(identifier="acme").update(timezone="America/New_York")
        assert [row.label for row in FrozenPeriod.objects.order_by("start")] == [f"2026-{n:02d}" for n in range(6, 11)]
        assert set(FrozenPeriod.objects.values_list("timezone", flat=True)) == {"UTC"}
        spend("acme", "2026-08-01T02:00")  # in New York it is still July
        (first, late) = close("2026-12-01")
        assert [str(first), str(late)] == ["acme 2026-06 v1", "acme 2026-08 v1"]
        assert Report.objects.count() == 2

    def test_usage_from_before_the_first_period_has_the_present_terms(self) -> None:
        account(timezone="America/New_York")
        spend("acme", "2026-10-20")
        flow()
        with edit_at("2026-10-25"):
            Account.objects.filter(identifier="acme").update(timezone="Europe/Berlin")
        spend("acme", "2026-09-10")
        reports = close("2026-12-05")
        assert [(iso(each.period_start), iso(each.period_end)) for each in reports] == [
            ("2026-08-31T22:00:00Z", "2026-10-01T04:00:00Z"),
            ("2026-10-01T04:00:00Z", "2026-11-01T04:00:00Z"),
        ]

    def test_an_adjustment_freezes_its_period(self) -> None:
        account()
        author = get_user_model().objects.create(username="finance")
        start = moment(at("2026-10-01"))
        Adjustment.objects.create(account="acme", period_start=start, quantity=5, reason="x", author=author)
        with edit_at("2026-10-20"):
            Account.objects.filter(identifier="acme").update(timezone="Asia/Kolkata")
        spend("acme", "2026-11-10")
        reports = close("2027-01-05")
        assert [(iso(each.period_start), iso(each.period_end)) for each in reports] == [
            ("2026-10-01T00:00:00Z", "2026-11-01T00:00:00Z"),
            ("2026-11-01T00:00:00Z", "2026-11-30T18:30:00Z"),
        ]

    def test_usage_whose_period_lost_its_row_is_not_billed_and_said_to_be_open(self) -> None:
        account()
        spend("acme", "2026-10-10")
        spend("globex", "2026-10-10")
        flow()
        FrozenPeriod.objects.filter(customer__names__identifier="acme")._raw_delete("default")
        (report,) = close("2026-11-05")
        assert report.account == "globex"
        for found in (open_periods(at("2026-11-05")), open_periods(at("2026-11-05"), month="2026-10")):
            (period,) = found
            assert (period.account, period.period, period.complete) == ("acme", None, False)
            assert period.why.endswith("restore this table from a backup")
        assert [each.report.account for each in statements("2026-10")] == ["globex"]
        assert any("acme" in finding and "billing periods" in finding for finding in Verification().findings())
