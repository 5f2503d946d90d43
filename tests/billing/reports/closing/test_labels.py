"""Test the month to which a billing period belongs: whoever takes one file a month has every period once."""

from __future__ import annotations

import io
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.db.models import QuerySet
from django.test import Client, override_settings
from django.urls import reverse

from ratelimits.algorithms.billing_periods import Period, month_of
from ratelimits.billing.models import Adjustment, PushedReport, Report
from ratelimits.billing.reports.rows import FINAL
from ratelimits.billing.reports.statements import statements
from ratelimits.billing.reports.verify import manifest
from ratelimits.billing.verification import Verification
from ratelimits.models import Account, FrozenPeriod
from ratelimits.moments import moment
from tests.support.plain import PLAIN
from tests.support.reports.edits import edit_at, spend
from tests.support.reports.files import MonthlyFiles
from tests.support.reports.invoices import close
from tests.support.usage.traffic import at

FILES = ("2026-01", "2026-02", "2026-03")
STRIPE = {"stripe": {"KEY": "sk_test", "SINCE": "2026-02"}}


@pytest.mark.parametrize(
    ("start", "end", "timezone", "name"),
    [
        ("2026-01-01T00:00", "2026-02-01T00:00", "UTC", "2026-01"),
        # The month after a move to the west: it begins on the last evening of January.
        ("2026-02-01T00:00", "2026-03-01T05:00", "America/New_York", "2026-02 (from 2026-01-31)"),
        ("2026-01-31T23:00", "2026-03-01T05:00", "America/New_York", "2026-02 (from 2026-01-31)"),
        ("2026-01-10T00:00", "2026-02-10T00:00", "UTC", "2026-02 (from 2026-01-10)"),
        ("2026-01-01T06:00", "2026-02-01T06:00", "UTC", "2026-02 (from 2026-01-01)"),
        ("2026-01-31T10:00", "2026-02-28T10:00", "Pacific/Kiritimati", "2026-02"),
        ("2026-02-01T11:00", "2026-03-01T11:00", "Pacific/Pago_Pago", "2026-02"),
        ("2026-02-01T00:00", "2026-03-01T00:00", "Mars/Olympus", "2026-02"),
    ],
)
def test_a_period_belongs_to_the_month_of_its_last_moment(start: str, end: str, timezone: str, name: str) -> None:
    period = Period(at(start), at(end), timezone, month_of(at(end) - 1, timezone))
    assert (period.label, period.name) == (name[:7], name)
    assert str(Report(account="acme", period_start=at(start), timezone=timezone, label=name[:7])) == f"acme {name} v1"


def moved_to_new_york(before: str | None) -> MonthlyFiles:
    """Use 10, 20 and 40 units in three months, move to New York in the first one, and take one file a month."""
    files = MonthlyFiles("2026-01", push="stripe")
    if before is not None:
        with edit_at("2025-01-01"):
            Account.objects.create(identifier="acme", timezone=before)
    spend("acme", "2026-01-03T12:00", 10)
    close("2026-01-04")
    with edit_at("2026-01-20"):
        if before is None:
            Account.objects.create(identifier="acme", timezone="America/New_York")
        else:
            Account.objects.filter(identifier="acme").update(timezone="America/New_York")
    for day, used_at, units in (("2026-02-05", "2026-02-14T12:00", 20), ("2026-03-05", "2026-03-31T23:00", 40)):
        close(day)
        files.take(at(day))
        spend("acme", used_at, units)
    close("2026-04-02")
    files.take(at("2026-04-02"))
    return files


@pytest.mark.django_db(transaction=True)
class TestMoves:
    @pytest.mark.parametrize("before", [None, "Europe/Berlin"])
    def test_nothing_is_left_out_for_whoever_takes_one_file_a_month(
        self, before: str | None, admin_client: Client
    ) -> None:
        with override_settings(RATELIMITS={**PLAIN, "PUSH": STRIPE}):
            files = moved_to_new_york(before)
            assert list(files.differences()) == []
            assert [sum(files.taken[month].values()) for month in FILES] == [10, 20, 40]
            labels = dict(Report.objects.values_list("pk", "label"))
            assert sorted(labels.values()) == list(FILES)
            assert sorted(labels[pk] for pk in PushedReport.objects.values_list("report", flat=True)) == [*FILES[1:]]
            assert list(Verification().findings()) == []
            for month, units in zip(FILES, (10, 20, 40), strict=True):
                (listed,) = manifest.build("default", month)["reports"].values()
                assert listed["totals"]["requests"][0] == units
                out = io.StringIO()
                call_command("ratelimits_verify", period=month, stderr=out)
                assert "Checked 1 report, " in out.getvalue()
                answer: Any = admin_client.get(reverse("ratelimits_billing:report"), {"period": month})
                assert f",{units},0,{units},0,1," in b"".join(answer.streaming_content).decode()
                page = admin_client.get(reverse("admin:ratelimits_billing_report_changelist"), {"month": month})
                assert [str(each)[:12] for each in page.context["cl"].result_list] == [f"acme {month}"]

    def test_a_correction_stays_in_the_month_of_its_period(self) -> None:
        """Adjust a closed period after its account has moved again: the file of its month has the correction."""
        with override_settings(RATELIMITS={**PLAIN, "PUSH": STRIPE}):
            files = moved_to_new_york("Europe/Berlin")
            february = Report.objects.get(label="2026-02")
            with edit_at("2026-04-03"):
                Account.objects.update(timezone="Pacific/Kiritimati", billing_anchor="2026-01-15T00:00")
            author = get_user_model().objects.create(username="finance")
            Adjustment.objects.create(
                account="acme", period_start=moment(february.period_start), quantity=-5, reason="x", author=author
            )
            (listed,) = manifest.build("default", "2026-02")["adjustments"]
            assert [manifest.build("default", month)["adjustments"] for month in ("2026-01", "2026-03")] == [{}, {}]
            (corrected,) = close("2026-04-05")
            files.take(at("2026-04-05"))
            assert (corrected.label, corrected.version) == ("2026-02", 2)
            assert list(files.differences()) == []
            assert list(manifest.build("default", "2026-02")["adjustments"]) == [listed]
            (statement,) = statements("2026-02")
            assert (statement.status, sum(row.consumed_quantity for row in statement.rows)) == (FINAL, 15)
            assert files.units() == 70

    def test_the_month_is_never_calculated_again(self) -> None:
        """Correct a report whose month is another one by the time zone data of today: the stored month stays."""
        with override_settings(RATELIMITS={**PLAIN, "PUSH": STRIPE}):
            moved_to_new_york(None)
            QuerySet(Report).filter(label="2026-02").update(label="2026-03")
            late = Report.objects.get(
                version=1, label="2026-03", timezone="America/New_York", period_end__lt=at("2026-03-15")
            )
            author = get_user_model().objects.create(username="finance")
            start = moment(late.period_start)
            Adjustment.objects.create(account="acme", period_start=start, quantity=1, reason="x", author=author)
            (corrected,) = close("2026-04-05")
            assert (corrected.label, corrected.version) == ("2026-03", 2)

    def test_the_month_of_a_report_is_in_its_digest_and_fits_its_end(self) -> None:
        with override_settings(RATELIMITS={**PLAIN, "PUSH": STRIPE}):
            moved_to_new_york(None)
            Report.objects.filter(label="2026-02").update(label="2026-01")
            found = list(Verification().findings())
            name = "report acme 2026-01 (from 2026-01-31) v1"
            assert f"{name}: its own columns or its lines do not match its digest" in found
            assert any(finding.startswith(f"{name} ends at") and "says" in finding for finding in found)
            FrozenPeriod.objects.filter(label="2026-02").update(label="2026-01")
            found = list(Verification().findings())
            assert any("belongs to the month 2026-01, but its last moment is in 2026-02" in each for each in found)
