"""The ledger in the admin. It is read-only."""

from __future__ import annotations

from datetime import UTC, date, time, tzinfo
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.db.models import OuterRef, QuerySet, Subquery
from django.http import HttpRequest
from django.urls import reverse
from django.utils.formats import date_format
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _

from ratelimits import moments
from ratelimits.admin.inspected import InspectedAdmin
from ratelimits.admin.readonly import ReadOnlyAdmin
from ratelimits.admin.searched import AccountSearch
from ratelimits.algorithms import calendar
from ratelimits.algorithms.billing_periods import month_of
from ratelimits.models import Rule
from ratelimits.moments import moment
from ratelimits.status.keys import typed_key
from ratelimits.status.operating import NO_ACCOUNT
from ratelimits.usage.models import ArchivedRange, Batch, Line, PeriodUsage, ShardState


def moment_text(microseconds: int) -> str:
    """Return a moment (µs since 1970 UTC) as text, in the time zone in which people type moments; "–" for 0."""
    return f"{moments.local(moment(microseconds)):%Y-%m-%d %H:%M:%S %Z}" if microseconds else "–"


def month_text(label: str) -> str:
    """Return a month like "2026-11" in words, such as "November 2026"."""
    year, month = map(int, label.split("-"))
    return date_format(date(year, month, 1), "YEAR_MONTH_FORMAT")


def period_text(start: int, end: int, timezone: str) -> str:
    """Return the month of a billing period as text, and its start and its end in this time zone.

    `start` and `end` are µs since 1970 UTC. If both are midnight, the text has only dates. If the time zone no longer
    exists, UTC is used.
    """
    month = month_text(month_of(end - 1, timezone))
    zone: tzinfo = UTC
    try:
        zone = calendar.zone(timezone)
    except ValueError:
        timezone = "UTC"
    edges = [moment(microseconds).astimezone(zone) for microseconds in (start, end)]
    form = "%Y-%m-%d" if all(edge.time() == time() for edge in edges) else "%Y-%m-%d %H:%M"
    return f"{month} ({edges[0]:{form}} – {edges[1]:{form}} {timezone})"


def link_to_lines(site: admin.AdminSite, **filters: object) -> str:
    """Return a link to the ledger lines that match these filters."""
    url = reverse(f"{site.name}:ratelimits_usage_line_changelist")
    return format_html('<a href="{}?{}">{}</a>', url, urlencode(filters), _("Ledger lines"))


def with_rule_names(rows: QuerySet[Any]) -> QuerySet[Any]:
    """Return the rows, each with the name of its rule. The query reads names only for the rows of the page."""
    names = Rule.objects.filter(pk=OuterRef("rule")).values("name")
    named: QuerySet[Any] = rows.annotate(rule_name=Subquery(names[:1]))
    return named


def link_to_rule(site: admin.AdminSite, row: Any) -> str:
    """Return a link to the rule of a row. The link shows the rule's name.

    Return the number of a rule that was deleted, and "–" for a row without a rule.
    """
    if not row.rule:
        return "–"
    if not row.rule_name:
        return str(row.rule)
    return format_html(
        '<a href="{}">{}</a>', reverse(f"{site.name}:ratelimits_rule_change", args=[row.rule]), row.rule_name
    )


class ShardFilter(admin.SimpleListFilter):
    """Filter rows by shard. The choices come from the table of shards, which is much smaller than the other tables."""

    title = _("shard")
    parameter_name = "shard"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[Any, str]]:
        shards = ShardState.objects.order_by("shard").filter(position__gt=0)
        # The choices are texts, as in a URL, because Django gives them to `queryset` to count the rows of each choice.
        return [(str(shard), f"{shard:02d}") for shard in shards.values_list("shard", flat=True)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
        # No shard has a number with more than five digits.
        is_number = chosen is not None and chosen.isascii() and chosen.isdecimal() and len(chosen) <= 5
        return queryset.filter(shard=chosen) if is_number else queryset


@admin.register(ShardState)
class ShardStateAdmin(ReadOnlyAdmin):
    """The state of each shard: its watermark and its last batch in the ledger."""

    list_display = ["__str__", "complete_until", "position", "seq", "frozen"]
    list_filter = ["frozen"]
    readonly_fields = ["complete_until"]

    @admin.display(description=_("complete until"), ordering="watermark")
    def complete_until(self, state: ShardState) -> str:
        """Return the watermark as text."""
        return moment_text(state.watermark)


@admin.register(Batch)
class BatchAdmin(ReadOnlyAdmin):
    """The batches in the ledger."""

    list_display = ["__str__", "position", "line_count", "sealed", "fence", "applied_at"]
    list_filter = [ShardFilter]
    search_fields = ["incarnation"]  # With this, Django shows a search box. get_search_results does the search.
    search_help_text = _("Search for a whole incarnation. The incarnation of batch 00:3f9c:17 is 3f9c.")
    sortable_by = ()
    exclude = ["opened_at", "sealed_at"]
    readonly_fields = ["opened", "sealed", "applied_at", "ledger_lines"]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search for the batches of an incarnation.

        The condition of the query lists all shards. With them, the database can use the table's index, which starts
        with the shard.
        """
        if not search_term:
            return queryset, False
        shards = ShardState.objects.using(queryset.db).values_list("shard", flat=True)
        return queryset.filter(shard__in=list(shards), incarnation=search_term), False

    @admin.display(description=_("opened"))
    def opened(self, batch: Batch) -> str:
        """Return when the batch was opened."""
        return moment_text(batch.opened_at)

    @admin.display(description=_("sealed"))
    def sealed(self, batch: Batch) -> str:
        """Return when the batch was sealed."""
        return moment_text(batch.sealed_at)

    @admin.display(description=_("ledger lines"))
    def ledger_lines(self, batch: Batch) -> str:
        """Return a link to the batch's lines. Their ids begin at `first` and end before `end`."""
        first, end = batch.line_ids()
        return link_to_lines(self.admin_site, id__gte=first, id__lt=end)


@admin.register(Line)
class LineAdmin(InspectedAdmin, AccountSearch, ReadOnlyAdmin):
    """The lines of the ledger. Each line has the usage of a key in 15 minutes."""

    list_display = [
        *("start", "account", "key", "meter", "rule_link"),
        *("admitted_units", "denied_requests", "shadow_requests", "refunded_units", "in_batch"),
    ]
    list_select_related = ["batch"]
    search_help_text = _(
        "Search for a whole account (its identifier or its name), for a whole key that was used in the last three days,"
        " or for an account and a key with a space between them. At most 10,000 lines are listed."
    )
    sortable_by = ()
    ordering = ["-id"]
    inspected_column = "key"
    readonly_fields = ["start", "rule_link"]
    exclude = ["rule"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Line]:
        return with_rule_names(super().get_queryset(request))

    def inspected(self, row: Line) -> tuple[str, str]:
        """Return the key and the account of a line. Return two empty texts if the inspector cannot show the key."""
        return (row.key, row.account or NO_ACCOUNT) if typed_key(row.key) == row.key else ("", "")

    @admin.display(description=_("rule"))
    def rule_link(self, line: Line) -> str:
        """Return a link to the rule that billed or refused the requests."""
        return link_to_rule(self.admin_site, line)

    @admin.display(description=_("batch"))
    def in_batch(self, line: Line) -> str:
        """Return a link to the line's batch. The link shows only the shard and the number, so the column is narrow."""
        url = reverse(f"{self.admin_site.name}:ratelimits_usage_batch_change", args=[line.batch_id])
        return format_html('<a href="{}">{}</a>', url, f"{line.batch.shard:02d}:{line.batch.seq}")

    @admin.display(description=_("15 minutes from"))
    def start(self, line: Line) -> str:
        """Return the start of the line's bin."""
        return f"{moment(line.bin * 1_000_000):%Y-%m-%d %H:%M} UTC"

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search for the lines of an account, of one key of an account, or of a key that was used lately."""
        if not search_term:
            return queryset, False
        for subjects in self.meanings(request, search_term):
            if Line.objects.using(queryset.db).filter(account__in=subjects.accounts).exists():
                return queryset.filter(account__in=subjects.accounts, **subjects.key_filter), False
        return queryset.none(), False


@admin.register(PeriodUsage)
class PeriodUsageAdmin(AccountSearch, ReadOnlyAdmin):
    """The totals of usage, by account and billing period."""

    list_display = [
        "account",
        "starts",
        "meter",
        "rule_link",
        "admitted_units",
        "denied_requests",
        "shadow_requests",
        "refunded_units",
        "state",
    ]
    sortable_by = ()
    ordering = ["-period", "-id"]
    readonly_fields = ["starts", "rule_link"]
    exclude = ["rule"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[PeriodUsage]:
        return with_rule_names(super().get_queryset(request))

    @admin.display(description=_("rule"))
    def rule_link(self, usage: PeriodUsage) -> str:
        """Return a link to the rule that counted the usage."""
        return link_to_rule(self.admin_site, usage)

    @admin.display(description=_("billing period"))
    def starts(self, usage: PeriodUsage) -> str:
        """Return when the period starts."""
        return f"{moment(usage.period * 1_000_000):%Y-%m-%d %H:%M} UTC"

    @admin.display(description=_("state"))
    def state(self, usage: PeriodUsage) -> str:
        """Return "finalised" if reports contain all of this usage. Otherwise the numbers can still change."""
        is_covered = usage.covered is not None and usage.covered >= usage.position
        return str(_("finalised") if is_covered else _("provisional"))


@admin.register(ArchivedRange)
class ArchivedRangeAdmin(ReadOnlyAdmin):
    """The ranges of batches that were moved to archives."""

    list_display = ["archive", "shard", "first_position", "last_position", "archived_at", "restored_at"]
    list_filter = [ShardFilter]
    readonly_fields = ["archived_at"]
