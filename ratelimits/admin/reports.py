"""Reports in the admin: read, downloaded, verified and traced back; people adjust them, nobody changes them."""

from __future__ import annotations

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
from ratelimits.reports.statements import lineage
from ratelimits.reports.verify.report import verify_report

#: Lines that a report's page shows, batches that a line's page names, and lines that a web request verifies, at most.
_LINES, _BATCHES, _VERIFIED = 200, 50, 50_000
_MONTHS = 24
#: An account's newest reports whose lines are searched.
_REPORTS = 500


def _database(row: Model) -> str:
    return row._state.db or conf.DATABASE


class MonthFilter(admin.SimpleListFilter):
    """Reports of the periods that start in a month, each by its own account's clocks."""

    title = _("month")
    parameter_name = "month"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[Any, str]]:
        last = now().year * 12 + now().month - 1
        months = [f"{each // 12}-{each % 12 + 1:02d}" for each in range(last, last - _MONTHS, -1)]
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
        own = (
            Q(timezone=zone, period_start__gte=first, period_start__lt=after) for zone, (first, after) in spans.items()
        )
        return near.filter(reduce(or_, own, Q(pk__in=())))


class CorrectedFilter(admin.SimpleListFilter):
    """Versions that correct an earlier one."""

    title = _("corrections")
    parameter_name = "corrected"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[Any, str]]:
        return [("1", str(_("corrections only"))), ("0", str(_("first versions only")))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        wanted = {"1": Q(version__gt=1), "0": Q(version=1)}.get(self.value() or "")
        return queryset if wanted is None else queryset.filter(wanted)


class _Lines(admin.TabularInline):  # type: ignore[type-arg]
    """The lines that a version brought in."""

    model = ReportLine
    verbose_name_plural = _("lines that this version brought in (the first 200; the downloads have all)")
    fields = [
        *("key", "meter", "charge_category", "charge_class", "consumed_quantity", "included_quantity"),
        *("overage_quantity", "refunded_quantity", "denied_count", "unknown_count", "rule"),
        "amount",
    ]
    readonly_fields = ["amount"]
    show_change_link = True
    max_num = 0
    can_delete = False
    #: By line_id, read once: an inline is made for each request.
    _amounts: dict[str, str] | None = None

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def get_queryset(self, request: HttpRequest) -> QuerySet[Model]:
        return super().get_queryset(request).filter(number__lte=_LINES).order_by("number")

    @admin.display(description=_("amount"))
    def amount(self, line: ReportLine) -> str:
        """What it costs, exact."""
        if self._amounts is None:
            self._amounts = line_amounts(line.report, _LINES)
        return self._amounts.get(line.line_id, "–")


@admin.register(Report)
class ReportAdmin(ReportDownloads, OpenPeriods, ReadOnlyAdmin):
    """The finalised reports."""

    list_display = ["payer", "starts", "ends", "timezone", "version", "line_count", "plan", "complete", "finalised_at"]
    list_filter = [MonthFilter, CorrectedFilter, ("gaps", admin.EmptyFieldListFilter)]
    search_fields = ["account__exact"]
    search_help_text = _("An account, whole.")
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
        """Who pays."""
        return report.account or str(_("anonymous"))

    @admin.display(description=_("start"))
    def starts(self, report: Report) -> str:
        """When the period starts."""
        return shown(report.period_start)

    @admin.display(description=_("end"))
    def ends(self, report: Report) -> str:
        """When the period ends."""
        return shown(report.period_end)

    @admin.display(description=_("amounts"))
    def charged(self, report: Report) -> str:
        """Show what each meter adds to the price of its period, and what the account owes by the report."""
        return summary(report)

    @admin.display(description=_("no gaps"), boolean=True)
    def complete(self, report: Report) -> bool:
        """Whether nothing is declared that may be missing, and the second witness agreed."""
        return not report.gaps

    @admin.display(description=_("second witness"))
    def compared(self, report: Report) -> str:
        """The ledger beside what the processes say, as both are now."""
        found = cross_check.compare(_database(report), report.account, report.period_start, report.period_end)
        text = _("{mark} {meter}: {ledger} in the ledger, {said} granted as processes say")
        beside = _("; {unanswered} unanswered, {unmetered} unmetered")
        rows = [
            (
                str(text).format(
                    # Those of archived usage are dropped.
                    mark=("✓" if each.holds else "✗") if each.witnessed or not each.ledger else "–",
                    meter=each.meter,
                    ledger=f"{each.ledger:,}",
                    said=f"{each.witnessed:,}",
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
            about = urlencode({"account": report.account, "period_start": start})
            context = {
                "adjust_url": f"{reverse(f'{self.admin_site.name}:ratelimits_adjustment_add')}?{about}",
                **context,
            }
        return super().change_view(request, object_id, form_url, context)

    @admin.action(description=_("Verify: make them again from the ledger"), permissions=["view"])
    def verify(self, request: HttpRequest, queryset: QuerySet[Report]) -> None:
        """Say of each whether it still holds."""
        for report in queryset:
            if report.line_count > _VERIFIED:
                self.message_user(
                    request, _("Report %(report)s is large: use ratelimits_verify.") % {"report": report}, "warning"
                )
                continue
            with closing(verify_report(report)) as findings:
                finding = next(findings, None)
            if finding is None:
                self.message_user(request, _("Report %(report)s holds.") % {"report": report}, messages.SUCCESS)
            else:
                self.message_user(request, finding, messages.ERROR)


@admin.register(ReportLine)
class ReportLineAdmin(ReadOnlyAdmin):
    """A line, and where it comes from."""

    list_display = ["line_id", "report", "key", "meter", "consumed_quantity", "overage_quantity", "rule"]
    list_select_related = ["report"]
    search_fields = ["line_id"]  # get_search_results says how
    search_help_text = _("A line_id, as exports have it; or an account, or an account, a space and a key. Each whole.")
    sortable_by = ()
    exclude = ["charge_period_start", "charge_period_end", "usage_period"]
    readonly_fields = ["used_from", "used_until", "rule_edits", "terms_edits", "batches", "ledger_lines"]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """The line, or the lines of an account's reports, or of a key in them: a key alone has no index."""
        if not search_term:
            return queryset, False
        lines = queryset.filter(line_id=search_term)
        if lines.exists():
            return lines, False
        for about in accounts_and_keys(search_term):
            account = about.pop("account")
            reports = Report.objects.using(queryset.db).filter(account=account)
            pks = list(reports.order_by("-pk").values_list("pk", flat=True)[:_REPORTS])
            if pks:
                return queryset.filter(**about, report__in=pks), False
        return lines, False

    @admin.display(description=_("used from"))
    def used_from(self, line: ReportLine) -> str:
        """Start of its charge period."""
        return shown(line.charge_period_start)

    @admin.display(description=_("used until"))
    def used_until(self, line: ReportLine) -> str:
        """End of its charge period."""
        return shown(line.charge_period_end)

    @admin.display(description=_("edits that made the rule so"))
    def rule_edits(self, line: ReportLine) -> str:
        """Who changed what, with the version that the line names."""
        return _edits(lineage.rule_edits(line, _database(line)))

    @admin.display(description=_("edits that made the terms so"))
    def terms_edits(self, line: ReportLine) -> str:
        """Who put the account on its plan, and said what that includes."""
        return _edits(lineage.terms_edits(line, _database(line)))

    @admin.display(description=_("batches"))
    def batches(self, line: ReportLine) -> str:
        """The batches that counted it."""
        found = list(lineage.batches(line, _database(line))[: _BATCHES + 1])
        url = f"{self.admin_site.name}:ratelimits_batch_change"
        rows = ((reverse(url, args=[batch.pk]), batch, batch.digest) for batch in found[:_BATCHES])
        text = format_html_join("", '<div><a href="{}">{}</a> {}</div>', rows)
        return format_html("{}…", text) if len(found) > _BATCHES else text or "–"

    @admin.display(description=_("its lines"))
    def ledger_lines(self, line: ReportLine) -> str:
        """A link to them; later versions of the report may have some of them."""
        about = {"account": line.report.account, "key": line.key, "meter": line.meter, "period": line.usage_period}
        return link_to_lines(self.admin_site, **about, rule=line.rule_id, version=line.rule_version)


def _edits(found: Any) -> str:
    rows = (
        (each.version, f"{each.at:%Y-%m-%d %H:%M:%S}", each.who or "–", each.kind, each.row, each.did, each.reason)
        for each in found
    )
    return format_html_join("", "<div>{}: {} UTC {}: {} “{}” {} {}</div>", rows) or "–"
