"""Reports in the admin. People read, download and verify them here, and see the edits and batches behind each line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import reduce
from operator import or_
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.db.models import Model, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.timezone import now
from django.utils.translation import gettext_lazy as _

from ratelimits.admin.charges import line_amounts, summary
from ratelimits.admin.exports import ReportDownloads
from ratelimits.admin.open_periods import OpenPeriods
from ratelimits.admin.readonly import ReadOnlyAdmin
from ratelimits.admin.usage import accounts_and_keys, link_to_lines, shown
from ratelimits.conf import conf
from ratelimits.models import Adjustment, Report, ReportLine
from ratelimits.models.ledger import moment
from ratelimits.reports import cross_check
from ratelimits.reports.periods import month_in, month_window
from ratelimits.reports.rows import TABLE
from ratelimits.reports.statements import lineage
from ratelimits.reports.verify.report import verify_report

#: Maximum number of lines on a report's page, of batches on a line's page, and of lines that a web request verifies.
_MAX_LINES, _MAX_BATCHES, _MAX_VERIFIED = 200, 50, 50_000
#: Number of months in the filter.
_MONTHS = 24
#: Number of an account's newest reports whose lines are searched.
_MAX_REPORTS = 500


def _database(row: Model) -> str:
    return row._state.db or conf.DATABASE


class MonthFilter(admin.SimpleListFilter):
    """Filter for reports of periods that start in a month, in the time zone of each report."""

    title = _("month")
    parameter_name = "month"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[Any, str]]:
        last = now().year * 12 + now().month - 1
        months = [f"{number // 12}-{number % 12 + 1:02d}" for number in range(last, last - _MONTHS, -1)]
        return [(month, month) for month in months]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        month = self.value()
        if not month:
            return queryset
        try:
            start, end = month_window(month)
        except ValueError:
            return queryset.none()
        near = queryset.filter(period_start__gte=start, period_start__lt=end)
        spans = {zone: month_in(month, zone) for zone in near.order_by().values_list("timezone", flat=True).distinct()}
        conditions = (
            Q(timezone=zone, period_start__gte=first, period_start__lt=after) for zone, (first, after) in spans.items()
        )
        return near.filter(reduce(or_, conditions, Q(pk__in=())))


class CorrectedFilter(admin.SimpleListFilter):
    """Filter for first versions, or for versions that correct an earlier version."""

    title = _("corrections")
    parameter_name = "corrected"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[Any, str]]:
        return [("1", str(_("corrections only"))), ("0", str(_("first versions only")))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        condition = {"1": Q(version__gt=1), "0": Q(version=1)}.get(self.value() or "")
        return queryset if condition is None else queryset.filter(condition)


#: The columns of lines that are computed from other columns, and the columns in the list of a report's lines.
_COMPUTED = [column.name for column in TABLE if column.of_line]
_LISTED = [column.name for column in TABLE if column.listed]


def _computed(of: Callable[[Any], Any], name: str) -> Callable[[Any, ReportLine], Any]:
    @admin.display(description=name)
    def shown(_admin: Any, line: ReportLine) -> Any:
        return of(line)

    return shown


class _ComputedColumns:
    """The columns of lines that are computed from stored columns."""

    vars().update({column.name: _computed(column.of_line, column.name) for column in TABLE if column.of_line})


class _Lines(_ComputedColumns, admin.TabularInline):  # type: ignore[type-arg]
    """The lines that a version added."""

    model = ReportLine
    verbose_name_plural = _("lines that this version added (the first 200; downloads contain all)")
    fields = [*_LISTED, "amount"]
    readonly_fields = [*_COMPUTED, "amount"]
    show_change_link = True
    max_num = 0
    can_delete = False
    #: Amounts by line_id, read once for each request: Django makes an inline object for each request.
    _amounts: dict[str, str] | None = None

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Model]:
        return super().get_queryset(request).filter(number__lte=_MAX_LINES).order_by("number")

    @admin.display(description=_("amount"))
    def amount(self, line: ReportLine) -> str:
        """Return the exact amount of the line."""
        if self._amounts is None:
            self._amounts = line_amounts(line.report, _MAX_LINES)
        return self._amounts.get(line.line_id, "–")


@admin.register(Report)
class ReportAdmin(ReportDownloads, OpenPeriods, ReadOnlyAdmin):
    """The finalised reports."""

    list_display = ["payer", "starts", "ends", "timezone", "version", "line_count", "plan", "complete", "finalised_at"]
    list_filter = [MonthFilter, CorrectedFilter, ("gaps", admin.EmptyFieldListFilter)]
    search_fields = ["account__exact"]
    search_help_text = _("Search for a whole account identifier.")
    sortable_by = ()
    fields = [
        *(
            "payer",
            "starts",
            "ends",
            "timezone",
            "version",
            "plan",
            "included",
            "line_count",
            "charged",
            "gaps",
            "compared",
        ),
        *("finalised_at", "digest", "previous_digest", "chain_head", "signature", "since", "chain"),
    ]
    inlines = [_Lines]
    actions = ["verify"]

    @admin.display(description=_("account"))
    def payer(self, report: Report) -> str:
        """Return the account, or "anonymous"."""
        return report.account or str(_("anonymous"))

    @admin.display(description=_("start"))
    def starts(self, report: Report) -> str:
        """Return when the period starts."""
        return shown(report.period_start)

    @admin.display(description=_("end"))
    def ends(self, report: Report) -> str:
        """Return when the period ends."""
        return shown(report.period_end)

    @admin.display(description=_("amounts"))
    def charged(self, report: Report) -> str:
        """Return the amounts of the report's meters and versions, and the total that the account owes for it."""
        return summary(report)

    @admin.display(description=_("no gaps"), boolean=True)
    def complete(self, report: Report) -> bool:
        """Return whether the report declares no gap, and its cross-check found no missing requests."""
        return not report.gaps

    @admin.display(description=_("cross-check"))
    def compared(self, report: Report) -> str:
        """Return the requests in the ledger and those that processes have counted, both as they are now."""
        found = cross_check.compare(_database(report), report.account, report.period_start, report.period_end)
        text = _("{mark} {meter}: {ledger} in the ledger, {said} counted by processes")
        beside = _("; {unanswered} unanswered, {unmetered} unmetered")
        rows = [
            (
                str(text).format(
                    # "–": the process totals were deleted, because the usage was archived.
                    mark=("✓" if each.holds else "✗") if each.granted or not each.ledger else "–",
                    meter=each.meter,
                    ledger=f"{each.ledger:,}",
                    said=f"{each.granted:,}",
                )
                + (
                    str(beside).format(unanswered=f"{each.unanswered:,}", unmetered=f"{each.unmetered:,}")
                    if each.unanswered or each.unmetered
                    else ""
                ),
            )
            for each in found
        ]
        return format_html_join("", "<div>{}</div>", rows) or "–"

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        report, context = self.get_object(request, object_id), extra_context or {}
        adjustments = self.admin_site.get_model_admin(Adjustment) if self.admin_site.is_registered(Adjustment) else None
        if report is not None and adjustments and adjustments.has_add_permission(request):
            start = moment(report.period_start).isoformat()
            query = urlencode({"account": report.account, "period_start": start})
            context = {
                "adjust_url": f"{reverse(f'{self.admin_site.name}:ratelimits_adjustment_add')}?{query}",
                **context,
            }
        return super().change_view(request, object_id, form_url, context)

    @admin.action(description=_("Verify the selected reports against the ledger"), permissions=["view"])
    def verify(self, request: HttpRequest, queryset: QuerySet[Report]) -> None:
        """Compute each report again from the ledger, and show whether it is the same."""
        for report in queryset:
            if report.line_count > _MAX_VERIFIED:
                self.message_user(
                    request,
                    _("Report %(report)s is too large for this page: use the command ratelimits_verify.")
                    % {"report": report},
                    "warning",
                )
                continue
            with closing(verify_report(report)) as findings:
                finding = next(findings, None)
            if finding is None:
                self.message_user(request, _("Report %(report)s is correct.") % {"report": report}, messages.SUCCESS)
            else:
                self.message_user(request, finding, messages.ERROR)


@admin.register(ReportLine)
class ReportLineAdmin(_ComputedColumns, ReadOnlyAdmin):
    """The lines of reports, each with the edits and the batches behind it."""

    list_display = ["line_id", "report", "key", "meter", "consumed_quantity", "overage_quantity", "rule"]
    list_select_related = ["report"]
    search_fields = ["line_id"]  # Only shows the search box: see get_search_results.
    search_help_text = _("Search for a whole line_id, a whole account, or an account, a space and a key.")
    sortable_by = ()
    exclude = ["charge_period_start", "charge_period_end", "usage_period"]
    readonly_fields = [
        *_COMPUTED,
        *("used_from", "used_until", "rule_edits", "terms_edits", "batches", "ledger_lines"),
    ]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search for a line_id, an account, or an account and a key. A key alone has no index."""
        if not search_term:
            return queryset, False
        lines = queryset.filter(line_id=search_term)
        if lines.exists():
            return lines, False
        for filters in accounts_and_keys(search_term):
            account = filters.pop("account")
            reports = Report.objects.using(queryset.db).filter(account=account)
            pks = list(reports.order_by("-pk").values_list("pk", flat=True)[:_MAX_REPORTS])
            if pks:
                return queryset.filter(**filters, report__in=pks), False
        return lines, False

    @admin.display(description=_("used from"))
    def used_from(self, line: ReportLine) -> str:
        """Return the start of the line's charge period."""
        return shown(line.charge_period_start)

    @admin.display(description=_("used until"))
    def used_until(self, line: ReportLine) -> str:
        """Return the end of the line's charge period."""
        return shown(line.charge_period_end)

    @admin.display(description=_("edits of the rule"))
    def rule_edits(self, line: ReportLine) -> str:
        """Return the edits that made the rule version of the line."""
        return _edits(lineage.rule_edits(line, _database(line)))

    @admin.display(description=_("edits of plan and account"))
    def terms_edits(self, line: ReportLine) -> str:
        """Return the edits that put the account on its plan, and those that set the plan's quantities and prices."""
        return _edits(lineage.terms_edits(line, _database(line)))

    @admin.display(description=_("batches"))
    def batches(self, line: ReportLine) -> str:
        """Return links to the batches that counted the line's usage."""
        batches = list(lineage.batches(line, _database(line))[: _MAX_BATCHES + 1])
        url = f"{self.admin_site.name}:ratelimits_batch_change"
        rows = ((reverse(url, args=[batch.pk]), batch, batch.digest) for batch in batches[:_MAX_BATCHES])
        text = format_html_join("", '<div><a href="{}">{}</a> {}</div>', rows)
        return format_html("{}…", text) if len(batches) > _MAX_BATCHES else text or "–"

    @admin.display(description=_("its ledger lines"))
    def ledger_lines(self, line: ReportLine) -> str:
        """Return a link to the line's ledger lines; some of them may belong to later versions of the report."""
        filters = {"account": line.report.account, "key": line.key, "meter": line.meter, "period": line.usage_period}
        return link_to_lines(self.admin_site, **filters, rule=line.rule_id, version=line.rule_version)


def _edits(edits: Any) -> str:
    rows = (
        (edit.version, f"{edit.at:%Y-%m-%d %H:%M:%S}", edit.who or "–", edit.kind, edit.row, edit.did, edit.reason)
        for edit in edits
    )
    return format_html_join("", "<div>{}: {} UTC {}: {} “{}” {} {}</div>", rows) or "–"
