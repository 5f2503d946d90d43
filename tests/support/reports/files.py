"""Take the file of each month once, as soon as all its periods have reports, and look at it again later."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from datetime import UTC, datetime
from zoneinfo import ZoneInfo

from django.db import connection

from ratelimits.billing.models import PushedReport, Report
from ratelimits.billing.push.deliveries import plan
from ratelimits.billing.push.receivers import receiver
from ratelimits.billing.reports.closing.labelled import open_in
from ratelimits.billing.reports.rows import FINAL
from ratelimits.billing.reports.statements import statements
from ratelimits.billing.reports.verify import manifest
from ratelimits.models.accounts.named import NamedCustomer, of_tokens
from ratelimits.moments import moment

#: A report without its version: the token of the customer and the start of the period.
Subject = tuple[str, int]
#: Hours after which a month is over in each time zone.
_OVER = 12 * 3600


def month_of(report: Report) -> str:
    """Return the month of a report's last moment, without the app's own code."""
    return f"{datetime.fromtimestamp((report.period_end - 1) // 1_000_000, ZoneInfo(report.timezone)):%Y-%m}"


class MonthlyFiles:
    """The files that one person takes, one for each month from `first` on, and the reports that a push plans."""

    def __init__(self, first: str, push: str = "") -> None:
        self.next, self.push = first, push
        self._never_closed: Collection[str] = ()
        #: By month: the units of each report in the file, when it was taken.
        self.taken: dict[str, dict[Subject, int]] = {}

    def take(self, now: int, never_closed: Collection[str] = ()) -> None:
        """Take the files of all months that are over at `now` (µs), and whose periods are all closed. Push too.

        Nobody waits for the periods of customers who had the account texts `never_closed`.
        """
        self._never_closed = never_closed
        if self.push:
            plan(receiver(self.push), moment(now))
        while now >= (self._end() + _OVER) * 1_000_000 and not any(self._awaited()):
            self.taken[self.next] = self._file(self.next)
            self.next = f"{datetime.fromtimestamp(self._end(), UTC):%Y-%m}"

    def _awaited(self) -> Iterator[NamedCustomer]:
        """Yield the customers whose open periods keep the next file from being taken."""
        customers = (customer for customer, _period in open_in(connection.alias, self.next))
        return (customer for customer in customers if not self._is_never_closed(customer))

    def _is_never_closed(self, customer: NamedCustomer) -> bool:
        return any(name.text in self._never_closed for name in customer.names)

    def _end(self) -> int:
        year, month = map(int, self.next.split("-"))
        return int(datetime(year + month // 12, month % 12 + 1, 1, tzinfo=UTC).timestamp())

    def _file(self, month: str) -> dict[Subject, int]:
        units: dict[Subject, int] = {}
        for statement in statements(month):
            token = statement.report.customer_id
            if statement.status != FINAL and self._is_never_closed(of_tokens(connection.alias, [token])[token]):
                continue
            assert statement.status == FINAL, f"{statement.report} is provisional in a file whose periods are closed"
            subject = statement.report.customer_id, statement.report.period_start
            assert subject not in units, f"{statement.report} is twice in its file"
            units[subject] = sum(row.consumed_quantity for row in statement.rows)
        return units

    def units(self) -> int:
        """Return the units of all files when they were taken."""
        return sum(sum(file.values()) for file in self.taken.values())

    def differences(self, late: Callable[[Report], bool] = lambda _report: False) -> Iterator[str]:
        """Yield what is wrong with the files. `late` says whether a first version is of usage that came late."""
        first = {(report.customer_id, report.period_start): report for report in Report.objects.filter(version=1)}
        for report in Report.objects.all():
            if (report.label, report.label) != (month_of(report), first[report.customer_id, report.period_start].label):
                yield f"{report} belongs to {month_of(report)}"
        files = {month: self._file(month) for month in self.taken}
        seen = [subject for file in files.values() for subject in file]
        if len(seen) != len(set(seen)):
            yield "a report is in two files"
        for subject, report in first.items():
            if report.label in self.taken and subject not in self.taken[report.label] and not late(report):
                yield f"{report} is not in the file of its month, which was taken when all its periods were closed"
            if subject not in files.get(report.label, ()):
                yield f"{report} is in no file"
        for month, file in self.taken.items():
            if gone := file.keys() - files[month].keys():
                yield f"{gone} were in the file of {month}, and are not any more"
            listed = manifest.build(connection.alias, month)["reports"]
            if len(listed) != Report.objects.filter(label=month).count():
                yield f"the manifest of {month} lists {len(listed)} reports"
        if self.push:
            since = receiver(self.push).since
            pushed = sorted(PushedReport.objects.values_list("report", flat=True))
            if pushed != sorted(report.pk for report in Report.objects.all() if report.label >= since):
                yield f"{len(pushed)} reports were pushed"
