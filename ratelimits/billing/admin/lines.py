"""The lines of reports in the admin: the lines on a report's page, and the page of each line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.contrib import admin
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext_lazy as _

from ratelimits.admin.readonly import ReadOnlyAdmin, database_of
from ratelimits.admin.searched import AccountSearch
from ratelimits.billing.admin.charges import line_amounts
from ratelimits.billing.models import Report, ReportLine
from ratelimits.billing.reports.rows import TABLE
from ratelimits.billing.reports.statements import lineage
from ratelimits.usage.admin.ledger import link_to_lines, moment_text
from ratelimits.usage.periods import SECOND

#: Maximum number of lines on a report's page.
_MAX_LINES = 200
#: Maximum number of batches on a line's page.
_MAX_BATCHES = 50
#: A search for an account's lines looks at this number of the account's newest reports.
_MAX_REPORTS = 500


#: Names of the columns of lines that are computed from stored columns.
_COMPUTED = [column.name for column in TABLE if column.from_line]
#: Names of the columns in the list of a report's lines.
_LISTED = [column.name for column in TABLE if column.listed]


def _computed(compute: Callable[[Any], Any], name: str) -> Callable[[Any, ReportLine], Any]:
    """Return a method for an admin page that computes a column of a line."""

    @admin.display(description=name)
    def value(_admin: Any, line: ReportLine) -> Any:
        return compute(line)

    return value


class _ComputedColumns:
    """Mixin with a method for each column of lines that is computed from stored columns."""

    # Django looks for these methods among the attributes of the class.
    vars().update({column.name: _computed(column.from_line, column.name) for column in TABLE if column.from_line})


class ReportLines(_ComputedColumns, admin.TabularInline):  # type: ignore[type-arg]
    """The lines that a version of a report added."""

    model = ReportLine
    verbose_name_plural = _("lines that this version added (the first 200; downloads contain all)")
    fields = [*_LISTED, "amount"]
    readonly_fields = [*_COMPUTED, "amount"]
    show_change_link = True
    max_num = 0
    can_delete = False
    #: Amounts by `line_id`. Django makes an inline object for each request, so amounts of an older request are never
    #: shown.
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


@admin.register(ReportLine)
class ReportLineAdmin(_ComputedColumns, AccountSearch, ReadOnlyAdmin):
    """The lines of reports, each with the edits and batches from which it was made."""

    list_display = ["line_id", "report", "key", "meter", "consumed_quantity", "overage_quantity", "rule"]
    list_select_related = ["report"]
    search_fields = ["line_id"]  # With this, Django shows a search box. get_search_results does the search.
    search_help_text = _(
        "Search for a whole line_id, a whole account (its identifier or its name, or the token of its customer), or a"
        " whole key that was used in the last three days. For an older key, type the account, a space and the key."
    )
    sortable_by = ()
    exclude = ["charge_period_start", "charge_period_end", "usage_period"]
    readonly_fields = [
        *_COMPUTED,
        *("used_from", "used_until", "rule_edits", "terms_edits", "batches", "ledger_lines"),
    ]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search for a line_id, an account, an account and a key, or a key that was used lately."""
        if not search_term:
            return queryset, False
        lines = queryset.filter(line_id=search_term)
        if lines.exists():
            return lines, False
        for subjects in self.meanings(request, search_term):
            tokens = subjects.customers(queryset.db)
            reports = Report.objects.using(queryset.db).filter(customer__token__in=tokens)
            pks = list(reports.order_by("-pk").values_list("pk", flat=True)[:_MAX_REPORTS])
            if pks:
                return queryset.filter(**subjects.key_filter, report__in=pks), False
        return lines, False

    @admin.display(description=_("used from"))
    def used_from(self, line: ReportLine) -> str:
        """Return the start of the line's charge period."""
        return moment_text(line.charge_period_start)

    @admin.display(description=_("used until"))
    def used_until(self, line: ReportLine) -> str:
        """Return the end of the line's charge period."""
        return moment_text(line.charge_period_end)

    @admin.display(description=_("edits of the rule"))
    def rule_edits(self, line: ReportLine) -> str:
        """Return the edits of the rule, and of its overrides, that have the rule version of the line."""
        return _edits(lineage.rule_edits(line, database_of(line)))

    @admin.display(description=_("edits of plan and account"))
    def terms_edits(self, line: ReportLine) -> str:
        """Return the edits that decided how the line was charged.

        These are edits of the account, of its plan, and of the plan's included quantities and prices.
        """
        return _edits(lineage.terms_edits(line, database_of(line)))

    @admin.display(description=_("batches"))
    def batches(self, line: ReportLine) -> str:
        """Return links to the batches that counted the line's usage."""
        batches = list(lineage.batches(line, database_of(line))[: _MAX_BATCHES + 1])
        url = f"{self.admin_site.name}:ratelimits_usage_batch_change"
        rows = ((reverse(url, args=[batch.pk]), batch, batch.digest) for batch in batches[:_MAX_BATCHES])
        text = format_html_join("", '<div><a href="{}">{}</a> {}</div>', rows)
        return format_html("{}…", text) if len(batches) > _MAX_BATCHES else text or "–"

    @admin.display(description=_("ledger lines"))
    def ledger_lines(self, line: ReportLine) -> str:
        """Return links to the ledger lines of this line's customer, key, meter, period and rule: one for each account.

        The lists may also show ledger lines that only a later version of the report contains.
        """
        filters = {"key": line.key, "meter": line.meter, "rule": line.rule_id, "version": line.rule_version}
        links = (
            (
                link_to_lines(
                    self.admin_site,
                    account=span.text,
                    bin__gte=span.start // SECOND,
                    bin__lt=span.end // SECOND,
                    **filters,
                ),
            )
            for span in lineage.spans_of(line, database_of(line))
        )
        return format_html_join("", "<div>{}</div>", links) or "–"


def _edits(edits: Any) -> str:
    rows = (
        (edit.version, f"{edit.at:%Y-%m-%d %H:%M:%S}", edit.who or "–", edit.kind, edit.row, edit.did, edit.reason)
        for edit in edits
    )
    return format_html_join("", "<div>{}: {} UTC {}: {} “{}” {} {}</div>", rows) or "–"
