"""The totals of reports by meter, links to other versions of a report, and links to other reports of its account."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import urlencode

from django.contrib.admin import AdminSite
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _

from ratelimits.billing.models import Report
from ratelimits.billing.reports.statements.meter_totals import MeterTotal, added_up, meter_totals
from ratelimits.usage.admin.ledger import period_text

#: Maximum number of lines that a list adds up. A report that would exceed this number gets a text instead of totals.
MAX_ADDED = 100_000
#: Maximum number of links to reports of other periods on a report's page.
_MAX_OTHERS = 12


class Overview(NamedTuple):
    """Two values of a report that the list shows.

    totals  the totals up to this version; None if the report has too many lines to add them up for a list
    newest  the number of the report's newest version
    """

    totals: list[MeterTotal] | None
    newest: int


def overviews(using: str, reports: Sequence[Report]) -> dict[int, Overview]:
    """Return the overviews of the reports in a list, by primary key. This takes two queries."""
    versions: dict[tuple[str, int], list[Report]] = defaultdict(list)
    tokens, starts = {report.customer_id for report in reports}, {report.period_start for report in reports}
    rows = Report.objects.using(using).filter(customer__token__in=tokens, period_start__in=starts).order_by("version")
    for row in rows.only("customer", "period_start", "version", "line_count"):
        versions[row.customer_id, row.period_start].append(row)
    # By report: the primary keys of the versions whose lines are added up.
    versions_of_report: dict[int, list[int]] = {}
    # By primary key of these versions: the number of lines.
    line_counts: dict[int, int] = {}
    for report in reports:
        up_to_version = [
            row for row in versions[report.customer_id, report.period_start] if row.version <= report.version
        ]
        # Leave out a report if, with its lines, more than `MAX_ADDED` lines would be added up.
        more_lines = {row.pk: row.line_count for row in up_to_version if row.pk not in line_counts}
        if sum(line_counts.values()) + sum(more_lines.values()) <= MAX_ADDED:
            line_counts |= more_lines
            versions_of_report[report.pk] = [row.pk for row in up_to_version]
    totals = meter_totals(using, line_counts.keys())
    overview_of = {}
    for report in reports:
        newest = max(row.version for row in [report, *versions[report.customer_id, report.period_start]])
        pks = versions_of_report.get(report.pk)
        overview_of[report.pk] = Overview(None if pks is None else added_up(totals.get(pk, []) for pk in pks), newest)
    return overview_of


def short_totals(totals: Iterable[MeterTotal] | None) -> str:
    """Return the totals as HTML, with one line for each meter."""
    if totals is None:
        return _("too many lines: see the page of the report")
    rows = []
    for total in totals:
        text = _("%(units)s %(meter)s, %(overage)s of them overage") if total.overage else _("%(units)s %(meter)s")
        rows.append((text % {"units": f"{total.billed:,}", "meter": total.meter, "overage": f"{total.overage:,}"},))
    return format_html_join("", "<div>{}</div>", rows) or "–"


def table_of_totals(using: str, report: Report, versions: Sequence[Report]) -> str:
    """Return a table, as HTML, with the totals of each meter up to a version of a report.

    If there are earlier versions, a second table has the totals of this version alone. `versions` are all versions of
    the report, oldest first.
    """
    pks = [version.pk for version in versions if version.version <= report.version]
    totals = meter_totals(using, pks)
    up_to_version = added_up(totals.values())
    tables = [("", up_to_version)]
    if len(pks) > 1:
        alone = added_up([totals.get(report.pk, [])])
        tables = [(_("up to this version"), up_to_version), (_("this version alone"), alone)]
    heads = (_("meter"), _("consumed"), _("refunded"), _("included"), _("overage"), _("billed"))
    head = format_html_join("", '<th scope="col">{}</th>', ((text,) for text in heads))
    texts = []
    for caption, rows in tables:
        body = format_html_join(
            "",
            '<tr><th scope="row">{}</th><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>',
            (
                (row.meter, *(f"{n:,}" for n in (row.consumed, row.refunded, row.included, row.overage, row.billed)))
                for row in rows
            ),
        )
        title = format_html("<caption>{}</caption>", caption) if caption else ""
        texts.append((format_html("<table>{}<thead><tr>{}</tr></thead><tbody>{}</tbody></table>", title, head, body),))
    return format_html_join("", '<div class="ratelimits-table" tabindex="0">{}</div>', texts) if up_to_version else "–"


def versions_of(using: str, report: Report) -> list[Report]:
    """Return all versions of a report, oldest first, without their long columns."""
    rows = Report.objects.using(using).filter(customer__token=report.customer_id, period_start=report.period_start)
    return list(rows.order_by("version").only("customer", "period_start", "version", "finalised_at"))


def links_to_versions(site: AdminSite, report: Report, versions: Sequence[Report]) -> str:
    """Return all versions of a report as HTML. The other versions are links. A note marks the newest version."""
    rows = []
    for version in versions:
        text = _("version %(n)s, finalised on %(day)s") % {
            "n": version.version,
            "day": f"{version.finalised_at:%Y-%m-%d}",
        }
        notes = []
        if version.pk == report.pk:
            notes.append(_("this version"))
        if version.version == versions[-1].version and len(versions) > 1:
            notes.append(_("the newest"))
        note = f" ({', '.join(notes)})" if notes else ""
        link = format_html("<strong>{}</strong>", text) if version.pk == report.pk else _link(site, version.pk, text)
        rows.append((link, note))
    return format_html_join("", "<div>{}{}</div>", rows)


def links_to_others(using: str, site: AdminSite, report: Report) -> str:
    """Return links to the customer's reports of other periods, newest period first.

    For each period, only the newest version has a link.
    """
    rows = (
        Report.objects.using(using).filter(customer__token=report.customer_id).exclude(period_start=report.period_start)
    )
    rows = rows.order_by("-period_start", "-version").only("period_start", "period_end", "timezone", "version")
    # Read more rows than links, because a report can have several versions.
    newest: dict[int, Report] = {}
    for row in rows[: 4 * _MAX_OTHERS]:
        newest.setdefault(row.period_start, row)
    links = [
        (_link(site, row.pk, period_text(row.period_start, row.period_end, row.timezone)),)
        for row in list(newest.values())[:_MAX_OTHERS]
    ]
    if not links:
        return "–"
    all_reports = (
        reverse(f"{site.name}:ratelimits_billing_report_changelist") + "?" + urlencode({"customer": report.customer_id})
    )
    links.append((format_html('<a href="{}">{}</a>', all_reports, _("All reports of this account")),))
    return format_html_join("", "<div>{}</div>", links)


def _link(site: AdminSite, pk: int, text: str) -> str:
    return format_html('<a href="{}">{}</a>', reverse(f"{site.name}:ratelimits_billing_report_change", args=[pk]), text)
