"""Verifying what closed periods' reports should print by now: declared gaps, and no more lost replies than were told.

A gap that is declared late, or changes, leaves a GapChange until the reports of before have it. That table only says
what closing still has to look at: a gap that is on no report and does not wait there was kept from being printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from django.db.models import Exists, OuterRef, Sum

from ratelimits.models import GapChange, Report, ReportLine
from ratelimits.reports.build import CHUNK
from ratelimits.reports.gaps import Gaps
from ratelimits.reports.unknown import Unknown
from ratelimits.reports.verify.report import readable


def verify_lacking(using: str) -> Iterator[str]:
    """Say which gaps the newest reports lack, and which lost replies on reports no process told of."""
    yield from _verify_gaps(using)
    yield from _verify_unknown(using)


def _verify_gaps(using: str) -> Iterator[str]:
    newer = Report.objects.filter(
        account=OuterRef("account"), period_start=OuterRef("period_start"), version__gt=OuterRef("version")
    )
    newest = Report.objects.using(using).exclude(Exists(newer)).order_by("period_start", "period_end", "account")
    for span, reports in groupby(newest.iterator(CHUNK), key=lambda report: (report.period_start, report.period_end)):
        gaps, settled = Gaps.between(using, *span), None
        for report in reports:
            if readable(report) and _lacking(report, gaps):
                # Read again, the report last: closing writes its further version before it forgets the change.
                settled = settled or _settled(using, *span)
                versions = Report.objects.using(using).filter(account=report.account, period_start=report.period_start)
                report = versions.order_by("-version").first() or report
                for text in _lacking(report, settled):
                    yield (
                        f"report {report} does not print a declared gap, and no closing will look at it again: {text}"
                    )


def _settled(using: str, start: int, end: int) -> Gaps:
    """Return the gaps of a time but those that closing still has to look at."""
    touching = list(Gaps.rows(using, start, end))
    waiting = set(GapChange.objects.using(using).values_list("gap_id", flat=True))
    return Gaps(gap for gap in touching if gap.pk not in waiting)


def _lacking(report: Report, gaps: Gaps) -> list[str]:
    span = report.period_start, report.period_end
    now = (gaps.text(int(shard), report.account, *span) for shard in report.chain)
    printed = {"", *report.gaps.split("; ")}
    return sorted({each for text in now for each in text.split("; ")} - printed)


def _verify_unknown(using: str) -> Iterator[str]:
    lines = ReportLine.objects.using(using).filter(unknown_count__gt=0)
    about = ("report__period_start", "report__period_end", "report__account", "key", "meter")
    sums = list(lines.values_list(*about).order_by(*about).annotate(Sum("unknown_count")))
    for (start, end), rows in groupby(sums, key=lambda row: row[:2]):
        unknown = Unknown(using, start, end)
        for _start, _end, account, key, meter, count in rows:
            said = unknown.of(account, start, end)[key, meter]
            if count > said:
                yield (
                    f"the reports of {account or 'anonymous'} say that {count} replies of {key} ({meter}) were lost,"
                    f" the totals of processes say {said}"
                )
