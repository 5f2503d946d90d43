"""Verify that reports print all declared gaps, and that they do not report more lost replies than processes counted.

If a gap is declared or changed after a report was finalised, a row in `GapChange` names the gap until a new version of
the report prints it. A gap that is neither on the report nor in `GapChange` will never be printed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby, islice

from django.db.models import Exists, OuterRef, Sum

from ratelimits.billing.models import Report, ReportLine
from ratelimits.billing.reports.build import CHUNK
from ratelimits.billing.reports.gaps import Gaps
from ratelimits.billing.reports.lost_replies import LostReplies
from ratelimits.billing.reports.verify.report import has_readable_positions
from ratelimits.models.accounts.named import NamedCustomer, of_tokens
from ratelimits.usage.models import GapChange


def verify_missing(using: str) -> Iterator[str]:
    """Yield an error for each gap that is missing on the newest version of a report, and for too many lost replies."""
    yield from _verify_gaps(using)
    yield from _verify_lost_replies(using)


def _verify_gaps(using: str) -> Iterator[str]:
    newer = Report.objects.filter(
        customer=OuterRef("customer"), period_start=OuterRef("period_start"), version__gt=OuterRef("version")
    )
    newest = Report.objects.using(using).exclude(Exists(newer)).order_by("period_start", "period_end", "account")
    for span, reports in groupby(newest.iterator(CHUNK), key=lambda report: (report.period_start, report.period_end)):
        all_gaps, unchanged_gaps = Gaps.between(using, *span), None
        for report, customer in _with_customers(using, reports):
            if has_readable_positions(report) and _missing(report, customer, all_gaps):
                # Read `GapChange` before the newest version of the report: a closing writes this version before it
                # deletes the row of `GapChange`. So if a gap has no row, this version prints the gap.
                unchanged_gaps = unchanged_gaps or _without_gap_change(using, *span)
                versions = Report.objects.using(using).filter(
                    customer__token=customer.token, period_start=report.period_start
                )
                report = versions.order_by("-version").first() or report
                for text in _missing(report, customer, unchanged_gaps):
                    yield (f"report {report} does not print a declared gap, and no closing will print it: {text}")


def _without_gap_change(using: str, start: int, end: int) -> Gaps:
    """Return the gaps that overlap a span of time. Leave out gaps in `GapChange`, because closing will check them."""
    overlapping = list(Gaps.rows(using, start, end))
    changed = set(GapChange.objects.using(using).values_list("gap_id", flat=True))
    return Gaps(gap for gap in overlapping if gap.pk not in changed)


def _with_customers(using: str, reports: Iterable[Report]) -> Iterator[tuple[Report, NamedCustomer]]:
    unread = iter(reports)
    while chunk := list(islice(unread, CHUNK)):
        customers = of_tokens(using, {report.customer_id for report in chunk})
        yield from ((report, customers[report.customer_id]) for report in chunk)


def _missing(report: Report, customer: NamedCustomer, gaps: Gaps) -> list[str]:
    """Return the texts of the gaps that should be on a report but are not."""
    text = gaps.text(list(map(int, report.chain)), customer, report.period_start, report.period_end)
    return sorted(set(text.split("; ")) - {"", *report.gaps.split("; ")})


def _verify_lost_replies(using: str) -> Iterator[str]:
    """Compare the lost replies on reports with the lost replies that processes counted."""
    lines = ReportLine.objects.using(using).filter(unknown_count__gt=0)
    columns = ("report__period_start", "report__period_end", "report__customer", "key", "meter")
    sums = list(lines.values_list(*columns).order_by(*columns).annotate(Sum("unknown_count")))
    for (start, end), rows in groupby(sums, key=lambda row: row[:2]):  # start and end
        lost, of_period = LostReplies(using, start, end), list(rows)
        customers = of_tokens(using, {row[2] for row in of_period})
        for _start, _end, token, key, meter, count in of_period:
            counted = lost.of(customers[token], start, end)[key, meter]
            if count > counted:
                yield (
                    f"the reports of {customers[token].account or 'anonymous'} say that {count} replies of {key}"
                    f" ({meter}) were lost, but processes counted only {counted}"
                )
