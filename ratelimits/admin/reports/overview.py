"""The totals of reports by meter, and the links between versions and between an account's reports."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from urllib.parse import urlencode

from django.contrib.admin import AdminSite
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext as _

from ratelimits.admin.usage import shown_period
from ratelimits.models import Report
from ratelimits.reports.statements.meter_totals import MeterTotal, added_up, meter_totals

#: Maximum number of lines that a list adds up. Totals of further reports are only on their pages.
MAX_ADDED = 100_000
#: Maximum number of other periods that a report's page links.
_MAX_OTHERS = 12


class Overview(NamedTuple):
    """What the list shows of a report: its totals up to this version, and the number of its newest version.

    totals  None if the report has too many lines to add them up for a list
    """

    totals: list[MeterTotal] | None
    newest: int


def overviews(using: str, reports: Sequence[Report]) -> dict[int, Overview]:
    """Return the overviews of the reports of a list, by primary key. Takes two queries."""
    versions: dict[tuple[str, int], list[Report]] = defaultdict(list)
    accounts, starts = ({getattr(report, name) for report in reports} for name in ("account", "period_start"))
    rows = Report.objects.using(using).filter(account__in=accounts, period_start__in=starts).order_by("version")
    for row in rows.only("account", "period_start", "version", "line_count"):
        versions[row.account, row.period_start].append(row)
    parts: dict[int, list[int]] = {}
    counted: dict[int, int] = {}
    for report in reports:
        own = [row for row in versions[report.account, report.period_start] if row.version <= report.version]
        more = {row.pk: row.line_count for row in own if row.pk not in counted}
        if sum(counted.values()) + sum(more.values()) <= MAX_ADDED:
            counted |= more
            parts[report.pk] = [row.pk for row in own]
    totals = meter_totals(using, counted)
    return {
        report.pk: Overview(
            added_up(totals.get(pk, []) for pk in parts[report.pk]) if report.pk in parts else None,
            max(row.version for row in [report, *versions[report.account, report.period_start]]),
        )
        for report in reports
    }


def short_totals(totals: Iterable[MeterTotal] | None) -> str:
    """Return the totals as one line of text for each meter."""
    if totals is None:
        return _("many lines: see its page")
    rows = []
    for total in totals:
        text = _("%(units)s %(meter)s, %(overage)s of them overage") if total.overage else _("%(units)s %(meter)s")
        rows.append((text % {"units": f"{total.billed:,}", "meter": total.meter, "overage": f"{total.overage:,}"},))
    return format_html_join("", "<div>{}</div>", rows) or "–"


def table_of_totals(using: str, report: Report, versions: Sequence[Report]) -> str:
    """Return a table with the totals of each meter, up to a version of a report, and of the version alone.

    `versions` are the report's versions, oldest first.
    """
    earlier = [version.pk for version in versions if version.version <= report.version]
    totals = meter_totals(using, earlier)
    every = added_up(totals.values())
    tables = [("", every)]
    if len(earlier) > 1:
        alone = added_up([totals.get(report.pk, [])])
        tables = [(_("up to this version"), every), (_("this version alone"), alone)]
    heads = (_("meter"), _("consumed"), _("refunded"), _("included"), _("overage"), _("billed"))
    head = format_html_join("", '<th scope="col">{}</th>', ((one,) for one in heads))
    texts = []
    for caption, rows in tables:
        body = format_html_join(
            "",
            '<tr><th scope="row">{}</th><td>{}</td><td>{}</td><td>{}</td><td>{}</td><td>{}</td></tr>',
            (
                (one.meter, *(f"{n:,}" for n in (one.consumed, one.refunded, one.included, one.overage, one.billed)))
                for one in rows
            ),
        )
        title = format_html("<caption>{}</caption>", caption) if caption else ""
        texts.append((format_html("<table>{}<thead><tr>{}</tr></thead><tbody>{}</tbody></table>", title, head, body),))
    return format_html_join("", '<div style="overflow-x:auto">{}</div>', texts) if every else "–"


def versions_of(using: str, report: Report) -> list[Report]:
    """Return all versions of a report, oldest first, without their long columns."""
    rows = Report.objects.using(using).filter(account=report.account, period_start=report.period_start)
    return list(rows.order_by("version").only("account", "period_start", "version", "finalised_at"))


def links_to_versions(site: AdminSite, report: Report, versions: Sequence[Report]) -> str:
    """Return links to the other versions of a report, and say which is the newest."""
    rows = []
    for version in versions:
        text = _("version %(n)s, finalised on %(day)s") % {
            "n": version.version,
            "day": f"{version.finalised_at:%Y-%m-%d}",
        }
        notes = [_("this one")] if version.pk == report.pk else []
        notes += [_("the newest")] if version.version == versions[-1].version and len(versions) > 1 else []
        named = f" ({', '.join(notes)})" if notes else ""
        shown = format_html("<strong>{}</strong>", text) if version.pk == report.pk else _link(site, version.pk, text)
        rows.append((shown, named))
    return format_html_join("", "<div>{}{}</div>", rows)


def links_to_others(using: str, site: AdminSite, report: Report) -> str:
    """Return links to the newest versions of the account's reports of other periods, newest period first."""
    rows = Report.objects.using(using).filter(account=report.account).exclude(period_start=report.period_start)
    rows = rows.order_by("-period_start", "-version").only("period_start", "period_end", "timezone", "version")
    newest: dict[int, Report] = {}
    for row in rows[: 4 * _MAX_OTHERS]:
        newest.setdefault(row.period_start, row)
    links = [
        (_link(site, row.pk, shown_period(row.period_start, row.period_end, row.timezone)),)
        for row in list(newest.values())[:_MAX_OTHERS]
    ]
    if not links:
        return "–"
    every = reverse(f"{site.name}:ratelimits_report_changelist") + "?" + urlencode({"account": report.account})
    links.append((format_html('<a href="{}">{}</a>', every, _("All reports of this account")),))
    return format_html_join("", "<div>{}</div>", links)


def _link(site: AdminSite, pk: int, text: str) -> str:
    return format_html('<a href="{}">{}</a>', reverse(f"{site.name}:ratelimits_report_change", args=[pk]), text)
