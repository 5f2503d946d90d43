"""Reports in the admin. Users read, download, adjust and verify reports."""

from __future__ import annotations

from contextlib import closing
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.contrib.admin.views.main import ChangeList
from django.db.models import Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html_join
from django.utils.translation import gettext_lazy as _

from ratelimits import moments
from ratelimits.admin.readonly import ReadOnlyAdmin, database_of
from ratelimits.admin.searched import AccountSearch
from ratelimits.billing.admin.charges import summary
from ratelimits.billing.admin.exports import ReportDownloads
from ratelimits.billing.admin.lines import ReportLines
from ratelimits.billing.admin.open_periods import OpenPeriods
from ratelimits.billing.admin.overview import (
    links_to_others,
    links_to_versions,
    overviews,
    short_totals,
    table_of_totals,
    versions_of,
)
from ratelimits.billing.models import Adjustment, Report
from ratelimits.billing.reports import cross_check
from ratelimits.billing.reports.gaps import in_words
from ratelimits.billing.reports.verify.report import verify_report
from ratelimits.models.accounts.named import NamedCustomer, of_tokens
from ratelimits.moments import moment
from ratelimits.usage.admin.ledger import moment_text, period_text

#: Maximum number of lines of a report that a web request verifies.
_MAX_VERIFIED = 50_000
#: Number of months in the filter.
_MONTHS = 24


class MonthFilter(admin.SimpleListFilter):
    """Filter reports by the month of their period: the month of its last moment, in the time zone of the report."""

    title = _("month")
    parameter_name = "month"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[Any, str]]:
        # Each month has a number: the months since the start of the year 0.
        last = moments.now().year * 12 + moments.now().month - 1
        months = [f"{number // 12}-{number % 12 + 1:02d}" for number in range(last, last - _MONTHS, -1)]
        return [(month, month) for month in months]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        month = self.value()
        if not month:
            return queryset
        return queryset.filter(label=month)


class CorrectedFilter(admin.SimpleListFilter):
    """Filter reports by version: only first versions, or only corrections of an earlier version."""

    title = _("corrections")
    parameter_name = "corrected"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[Any, str]]:
        return [("1", str(_("corrections only"))), ("0", str(_("first versions only")))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        condition = {"1": Q(version__gt=1), "0": Q(version=1)}.get(self.value() or "")
        return queryset if condition is None else queryset.filter(condition)


def customer_of(report: Any) -> NamedCustomer:
    """Return the customer of a report, and store it on the row for further calls."""
    if not hasattr(report, "named_customer"):
        report.named_customer = of_tokens(database_of(report), [report.customer_id])[report.customer_id]
    found: NamedCustomer = report.named_customer
    return found


@admin.register(Report)
class ReportAdmin(ReportDownloads, OpenPeriods, AccountSearch, ReadOnlyAdmin):
    """The finalised reports."""

    list_display = ["payer", "period", "which_version", "totals", "plan", "complete", "finalised_at"]
    search_help_text = _("Search for a whole account (its identifier or its name), or for the token of a customer.")
    list_filter = [MonthFilter, CorrectedFilter, ("gaps", admin.EmptyFieldListFilter)]
    sortable_by = ()
    fields = [
        *(
            "payer",
            "starts",
            "ends",
            "timezone",
            "versions",
            "others",
            "plan",
            "included",
            "line_count",
            "meters",
            "charged",
            "declared_gaps",
            "compared",
        ),
        *("finalised_at", "digest", "previous_digest", "chain_head", "signature", "since", "chain"),
    ]
    inlines = [ReportLines]
    actions = ["verify"]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search for the reports of a customer, by its token, its name, or an account text that it has ever had."""
        if not search_term:
            return queryset, False
        tokens = self.subjects(request, search_term).customers(queryset.db)
        return queryset.filter(customer__token__in=tokens), False

    @admin.display(description=_("account"))
    def payer(self, report: Report) -> str:
        """Return the account; "anonymous" for usage without an account."""
        return report.account or str(_("anonymous"))

    def get_changelist_instance(self, request: HttpRequest) -> ChangeList:
        """Return the list, in which each row has its totals. The totals of all rows are read together."""
        changelist = super().get_changelist_instance(request)
        rows: Any = changelist.result_list
        overview_of = overviews(database_of(rows[0]), rows) if rows else {}
        for row in rows:
            row.overview = overview_of[row.pk]
        return changelist

    @admin.display(description=_("period"))
    def period(self, report: Report) -> str:
        """Return the start and the end of the period, in the time zone of the report."""
        return period_text(report.period_start, report.period_end, report.timezone)

    @admin.display(description=_("version"))
    def which_version(self, report: Any) -> str:
        """Return the version of the report. If there is a newer version, the text also names the newest version."""
        newest = report.overview.newest
        if newest == report.version:
            return str(report.version)
        return str(_("%(version)s (newest: %(newest)s)") % {"version": report.version, "newest": newest})

    @admin.display(description=_("billed, up to this version"))
    def totals(self, report: Any) -> str:
        """Return the billed units of each meter, as the sum of all versions up to this version."""
        return short_totals(report.overview.totals)

    @admin.display(description=_("versions"))
    def versions(self, report: Report) -> str:
        """Return links to the report's earlier and later versions."""
        return links_to_versions(self.admin_site, report, versions_of(database_of(report), report))

    @admin.display(description=_("totals"))
    def meters(self, report: Report) -> str:
        """Return the totals of each meter."""
        using = database_of(report)
        return table_of_totals(using, report, versions_of(using, report))

    @admin.display(description=_("other periods"))
    def others(self, report: Report) -> str:
        """Return links to the customer's reports of other periods."""
        return links_to_others(database_of(report), self.admin_site, report)

    @admin.display(description=_("start"))
    def starts(self, report: Report) -> str:
        """Return when the period starts."""
        return moment_text(report.period_start)

    @admin.display(description=_("end"))
    def ends(self, report: Report) -> str:
        """Return when the period ends."""
        return moment_text(report.period_end)

    @admin.display(description=_("amounts"))
    def charged(self, report: Report) -> str:
        """Return the amounts of the report's meters and versions, and the total that the account owes."""
        return summary(report)

    @admin.display(description=_("durability gaps"))
    def declared_gaps(self, report: Report) -> str:
        """Return what the report says about missing usage, a line for each gap."""
        return format_html_join("", "<div>{}</div>", ((gap,) for gap in in_words(report.gaps))) or "–"

    @admin.display(description=_("no gaps"), boolean=True)
    def complete(self, report: Report) -> bool:
        """Return whether the report states no gap.

        If the cross-check finds that requests are missing, the report states a gap too.
        """
        return not report.gaps

    @admin.display(description=_("cross-check"))
    def compared(self, report: Report) -> str:
        """Return, by meter, the requests that the ledger has now, and the requests that processes have counted."""
        customer = customer_of(report)
        comparisons = cross_check.compare(database_of(report), customer, report.period_start, report.period_end)
        text = _("{mark} {meter}: {ledger} in the ledger, {said} counted by processes")
        uncertain_text = _("; {unanswered} unanswered, {unmetered} unmetered")
        rows = [
            (
                str(text).format(
                    # "–": the process totals were deleted, because the usage was archived.
                    mark=("✓" if meter.holds else "✗") if meter.counted or not meter.ledger else "–",
                    meter=meter.meter,
                    ledger=f"{meter.ledger:,}",
                    said=f"{meter.counted:,}",
                )
                + (
                    str(uncertain_text).format(unanswered=f"{meter.unanswered:,}", unmetered=f"{meter.unmetered:,}")
                    if meter.unanswered or meter.unmetered
                    else ""
                ),
            )
            for meter in comparisons
        ]
        return format_html_join("", "<div>{}</div>", rows) or "–"

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        report, context = self.get_object(request, object_id), extra_context or {}
        adjustments = self.admin_site.get_model_admin(Adjustment) if self.admin_site.is_registered(Adjustment) else None
        if report is not None and adjustments and adjustments.has_add_permission(request):
            # The text of the customer at this moment, or else the text that stands for the customer in any case.
            (account, *_others), start = customer_of(report).texts_at(report.period_start), moment(report.period_start)
            query = urlencode({"account": account, "period_start": start.isoformat()})
            context = {
                "adjust_url": f"{reverse(f'{self.admin_site.name}:ratelimits_billing_adjustment_add')}?{query}",
                **context,
            }
        return super().change_view(request, object_id, form_url, context)

    @admin.action(description=_("Verify the selected reports against the ledger"), permissions=["view"])
    def verify(self, request: HttpRequest, queryset: QuerySet[Report]) -> None:
        """Compute each report again from the ledger. Show whether the result is the same as the report."""
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
