"""Test that a month's file leads to corrections in the files of earlier months."""

from __future__ import annotations

import html
import io
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from django.core.management import call_command
from django.test import Client

from ratelimits.billing.models import Report
from ratelimits.billing.reports.statements.gained import Gain, gains
from tests.billing.reports.test_amounts import adjust
from tests.support.below import SITE
from tests.support.reports.invoices import account, close, spend

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]

#: The last moment of 2026-10 and the first of 2026-11, in UTC, and the last moment at which a report of 2026-10 is not
#: late.
BEFORE, AFTER = datetime(2026, 10, 31, 23, 59, 59, tzinfo=UTC), datetime(2026, 11, 1, tzinfo=UTC)
ON_TIME = datetime(2026, 11, 4, tzinfo=UTC)
LATER = datetime(2026, 11, 20, 9, 30, tzinfo=UTC)


def made(at: datetime, month: str, version: int = 1, payer: str = "acme") -> None:
    """Let a report seem to be made at another moment."""
    assert Report.objects.filter(label=month, version=version, account=payer).update(finalised_at=at) == 1


@pytest.fixture(autouse=True)
def _months() -> None:
    """Close August to November of one customer. Correct August and September, and close a late first September."""
    acme = account(included=5)
    for month in ("08", "09", "10", "11"):
        spend(acme, f"2026-{month}-10", 7)
    close("2026-12-02")
    for month in ("08", "09"):
        made(BEFORE, f"2026-{month}")
    made(ON_TIME, "2026-10")
    made(LATER, "2026-11")
    adjust(-1, "2026-08-01T00:00:00+00:00")
    adjust(-1, "2026-09-01T00:00:00+00:00")
    spend(account("late"), "2026-09-11")
    close("2026-12-02")
    made(BEFORE, "2026-08", 2)
    made(AFTER, "2026-09", 2)
    made(LATER, "2026-09", payer="late")


def said(command: str, *arguments: str, **options: str) -> str:
    err = io.StringIO()
    call_command(command, *arguments, stdout=io.StringIO(), stderr=err, **options)
    return "".join(line for line in err.getvalue().splitlines(True) if "gained" in line)


def test_what_was_made_since_the_month_began_is_counted_by_month() -> None:
    assert list(gains("default", "2026-11")) == [Gain("2026-09", 1, 1, LATER)]
    assert list(gains("default", "2026-11", "late")) == [Gain("2026-09", 0, 1, LATER)]
    assert list(gains("default", "2026-09")) == [Gain("2026-08", 1, 1, BEFORE)]
    assert list(gains("default", "2026-08")) == []
    with pytest.raises(ValueError, match="is not a month"):
        list(gains("default", "November"))


def test_first_reports_of_the_month_before_count_if_they_are_late() -> None:
    made(ON_TIME + timedelta(microseconds=1), "2026-10")
    assert list(gains("default", "2026-11"))[1:] == [Gain("2026-10", 0, 1, ON_TIME + timedelta(microseconds=1))]


def test_commands_name_these_months(tmp_path: Path) -> None:
    words = "Since 2026-11 began (UTC), 2026-09 has gained"
    again = "of 2026-09 again if yours is older.\n"
    both = f"{words} 1 correction and 1 late first report, the newest at 2026-11-20 09:30:00 UTC: write the file"
    assert said("ratelimits_report", period="2026-11", output=str(tmp_path / "november.csv")) == f"{both} {again}"
    assert said("ratelimits_manifest", "2026-11") == f"{both} and the manifest {again}"
    assert said("ratelimits_report", period="2026-11", account="acme") == (
        f"{words} 1 correction, the newest at 2026-11-01 00:00:00 UTC: write the file {again}"
    )
    assert said("ratelimits_report", period="2026-08") == ""


def test_the_download_names_these_months_before_it_gives_the_file(admin_client: Client) -> None:
    url = f"{SITE}/admin/ratelimits_billing/report/download/"
    page = html.unescape(admin_client.get(url, {"period": "2026-11"}, follow=True).content.decode())
    assert (
        "Since November 2026 began (UTC), the file of September 2026 has gained reports (corrections: 1; late first"
        " reports: 1). The newest was made at 2026-11-20 09:30:00 UTC. If your file is older, download it again."
    ) in page
    assert "the file of August 2026" not in page
    (link,) = re.findall(r'href="([^"]*lacking=1)">Download the file<', page)
    assert admin_client.get(link)["Content-Disposition"] == 'attachment; filename="usage-2026-11.csv"'
    assert admin_client.get(url, {"period": "2026-08"}).streaming
