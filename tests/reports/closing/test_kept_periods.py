"""Test that a billing period with usage keeps its start and end, however its account's terms change."""

from __future__ import annotations

from random import Random

import pytest
from django.core.exceptions import ValidationError
from django.db.models import QuerySet

from ratelimits.algorithms.billing_periods import SHORTEST, periods_around
from ratelimits.models import Account, Adjustment, KeptPeriod, PeriodUsage, Report, versions
from ratelimits.models.ledger import moment
from ratelimits.reports.periods import iso
from ratelimits.rules.loader import Loader
from tests.support.reports.edits import edit_at, spend
from tests.support.reports.invoices import account, close
from tests.support.usage.traffic import at, flow, use

ZONES = ("UTC", "Europe/Berlin", "America/New_York", "Pacific/Kiritimati", "Pacific/Pago_Pago", "Asia/Kolkata")
ANCHORS = (None, "2026-01-31T06:00", "2026-01-02T00:00", "2026-01-15T12:30", "2024-02-29T23:59")


def test_periods_follow_on_a_kept_one_without_gap_or_overlap() -> None:
    draw, month = Random(7), 31 * 86_400_000_000
    for _time in range(300):
        start = at("2026-01-01") + draw.randrange(24 * month) // 1_000_000 * 1_000_000
        kept = start, start + draw.randrange(SHORTEST, 2 * month) // 1_000_000 * 1_000_000
        terms = draw.choice(ZONES), draw.choice(ANCHORS)
        spans: list[tuple[int, int]] = []
        moment = start - 1
        while moment < start + 6 * month:
            previous, current, following, later = periods_around(*terms, kept, moment)
            assert previous < current <= moment < following < later
            if spans:
                assert (previous, current) == spans[-1]
            assert periods_around(*terms, kept, following)[:3] == (current, following, later)
            assert periods_around(*terms, kept, following - 1) == (previous, current, following, later)
            spans.append((current, following))
            moment = following
        assert kept in spans
        assert all(SHORTEST <= end - begun < 2 * month for begun, end in spans[2:])


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
        with pytest.raises(ValidationError, match="correct the account first"):
            check("2026-11-15")

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

    @pytest.mark.parametrize("leave", ["delete", "rename"])
    def test_a_name_that_no_account_has_any_more_keeps_the_period_too(self, leave: str) -> None:
        acme = account(included=100, timezone="Europe/Berlin", billing_anchor="2026-01-15T00:00")
        spend("acme", "2026-10-20", 80)
        flow()
        with edit_at("2026-10-25"):
            if leave == "delete":
                acme.delete()
            else:
                acme.identifier = "initech"
                acme.save()
        spend("acme", "2026-10-28", 5)
        spend("initech", "2026-10-28", 5)
        flow()
        ends = {row.account: (row.period, row.period_end) for row in PeriodUsage.objects.all()}
        assert ends["acme"] == (at("2026-10-14T22:00") // 10**6, at("2026-11-14T23:00") // 10**6)
        if leave == "rename":
            assert ends["initech"] == ends["acme"]

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
        assert not KeptPeriod.objects.exists()
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
        assert held.kept == held.boundaries[1:3] == before[1:3]

    def test_a_period_that_was_tallied_without_its_end_is_kept_too(self) -> None:
        account()
        spend("acme", "2026-10-10")
        flow()
        PeriodUsage.objects.update(period_end=None)
        with edit_at("2026-10-20"):
            Account.objects.filter(identifier="acme").update(billing_anchor="2026-01-15T00:00")
        spend("acme", "2026-10-21")
        (report,) = close("2026-11-05")
        assert (iso(report.period_start), iso(report.period_end)) == ("2026-10-01T00:00:00Z", "2026-11-01T00:00:00Z")
        assert Report.objects.count() == 1
