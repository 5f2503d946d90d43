"""The ledger in the admin. It is read-only. People can only accept or discard quarantined batches."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, time, tzinfo
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models import OuterRef, QuerySet, Subquery
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext_lazy as _

from ratelimits.admin.inspected import InspectedAdmin
from ratelimits.admin.readonly import ReadOnlyAdmin
from ratelimits.admin.searched import AccountSearch
from ratelimits.algorithms import calendar
from ratelimits.models import (
    ArchivedRange,
    Batch,
    DurabilityGap,
    Line,
    PeriodUsage,
    QuarantinedBatch,
    Rule,
    ShardState,
)
from ratelimits.models.ledger import moment
from ratelimits.quota.operating import NO_ACCOUNT
from ratelimits.status.known_keys import typed_key
from ratelimits.usage import resolve
from ratelimits.usage.packet import values

#: Maximum number of lines on the page of a quarantined batch.
_MAX_LINES = 50


def moment_text(microseconds: int) -> str:
    """Return a moment (µs since 1970 UTC) as text; "–" for 0."""
    return f"{moment(microseconds):%Y-%m-%d %H:%M:%S} UTC" if microseconds else "–"


def period_text(start: int, end: int, timezone: str) -> str:
    """Return the start and the end of a billing period as text, in the time zone.

    `start` and `end` are µs since 1970 UTC. If both are midnight, the text has only dates. If the time zone no longer
    exists, UTC is used.
    """
    zone: tzinfo = UTC
    try:
        zone = calendar.zone(timezone)
    except ValueError:
        timezone = "UTC"
    moments = [moment(microseconds).astimezone(zone) for microseconds in (start, end)]
    form = "%Y-%m-%d" if all(edge.time() == time() for edge in moments) else "%Y-%m-%d %H:%M"
    return f"{moments[0]:{form}} – {moments[1]:{form}} {timezone}"


def link_to_lines(site: admin.AdminSite, **filters: object) -> str:
    """Return a link to the ledger lines that match these filters."""
    url = reverse(f"{site.name}:ratelimits_line_changelist")
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
        return [(shard, f"{shard:02d}") for shard in shards.values_list("shard", flat=True)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
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

        The search names all shards, because the index of the table starts with the shard.
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

    @admin.display(description=_("its lines"))
    def ledger_lines(self, batch: Batch) -> str:
        """Return a link to the batch's lines."""
        first, end = batch.line_ids()
        return link_to_lines(self.admin_site, id__gte=first, id__lt=end)


@admin.register(Line)
class LineAdmin(InspectedAdmin, AccountSearch, ReadOnlyAdmin):
    """The lines of the ledger. Each has the usage of a key in 15 minutes."""

    list_display = [
        *("start", "account", "key", "meter", "rule_link"),
        *("admitted_units", "denied_requests", "shadow_requests", "refunded_units", "in_batch"),
    ]
    list_select_related = ["batch"]
    search_help_text = _(
        "Search for a whole account (its identifier or its name), for a whole key that was used in the last three days,"
        " or for an account, a space and a key. At most 10,000 lines are listed."
    )
    sortable_by = ()
    ordering = ["-id"]
    inspected_column = "key"
    readonly_fields = ["start", "rule_link"]
    exclude = ["rule"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Line]:
        return with_rule_names(super().get_queryset(request))

    def inspected(self, row: Line) -> tuple[str, str]:
        return (row.key, row.account or NO_ACCOUNT) if typed_key(row.key) == row.key else ("", "")

    @admin.display(description=_("rule"))
    def rule_link(self, line: Line) -> str:
        """Return a link to the rule that billed or refused the requests."""
        return link_to_rule(self.admin_site, line)

    @admin.display(description=_("batch"))
    def in_batch(self, line: Line) -> str:
        """Return a link to the line's batch. The link shows only the shard and the number, so the column is narrow."""
        url = reverse(f"{self.admin_site.name}:ratelimits_batch_change", args=[line.batch_id])
        return format_html('<a href="{}">{}</a>', url, f"{line.batch.shard:02d}:{line.batch.seq}")

    @admin.display(description=_("15 minutes from"))
    def start(self, line: Line) -> str:
        """Return the start of the line's bin."""
        return f"{moment(line.bin * 1_000_000):%Y-%m-%d %H:%M} UTC"

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Search for the lines of an account, or of one key of the account.

        The search names the billing periods of the account's usage, because the index of the table starts with the
        billing period.
        """
        if not search_term:
            return queryset, False
        for subjects in self.meanings(request, search_term):
            of_accounts = {"account__in": subjects.accounts}
            periods = PeriodUsage.objects.using(queryset.db).filter(**of_accounts).order_by()
            starts = list(periods.values_list("period", flat=True).distinct())
            if starts:
                return queryset.filter(**of_accounts, **subjects.key_filter, period__in=starts), False
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
        "closed",
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

    @admin.display(description=_("finalised"), boolean=True)
    def closed(self, usage: PeriodUsage) -> bool:
        """Return whether a report contains all of this usage."""
        return usage.covered is not None and usage.covered >= usage.position


@admin.register(DurabilityGap)
class DurabilityGapAdmin(AccountSearch, ReadOnlyAdmin):
    """The gaps: spans of time in which usage may be missing."""

    list_display = ["kind", "shard", "account", "from_", "to", "fsync", "units", "recovered_at"]
    list_filter = ["kind"]
    sortable_by = ()
    exclude = ["since", "until"]
    readonly_fields = ["from_", "to", "declared_at"]

    @admin.display(description=_("from"))
    def from_(self, gap: DurabilityGap) -> str:
        """Return the start of the gap."""
        return moment_text(gap.since)

    @admin.display(description=_("to"))
    def to(self, gap: DurabilityGap) -> str:
        """Return the end of the gap."""
        return moment_text(gap.until)


@admin.register(QuarantinedBatch)
class QuarantinedBatchAdmin(ReadOnlyAdmin):
    """Batches about which a person must decide. Until then the watermark of their shard does not advance."""

    list_display = ["__str__", "reason", "arrived_at", "resolution"]
    list_filter = [("resolved_at", admin.EmptyFieldListFilter)]
    actions = ["accept", "discard"]
    readonly_fields = ["missing_lines", "arrived_at"]
    fields = [
        "shard",
        "name",
        "reason",
        "arrived_at",
        "missing_lines",
        "resolution",
        "resolved_at",
        "content",
        "fields",
    ]

    def has_resolve_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may accept and discard batches."""
        user: Any = request.user
        return bool(user.has_perm("ratelimits.resolve"))

    @admin.display(description=_("lines that the ledger does not have"))
    def missing_lines(self, quarantined: QuarantinedBatch) -> str:
        """Return, as HTML, the lines that `accept` would add to the ledger."""
        if quarantined.resolved_at is not None:
            return "–"
        try:
            lines = resolve.missing_lines(quarantined._state.db or "default", quarantined)
        except resolve.UnresolvableError as error:
            return str(error)
        if not lines:
            return str(_("None: the ledger has all lines of the batch."))
        rows = [values(line) for line in lines[:_MAX_LINES]]
        first_lines = format_html_join(
            "", "<div>{} {}: {} {}</div>", ((row[0], row[1], row[8], row[2]) for row in rows)
        )
        if len(lines) <= _MAX_LINES:
            return first_lines
        return format_html("{}<div>{}</div>", first_lines, _("%(n)d lines in all") % {"n": len(lines)})

    @admin.action(
        description=_("Accept the selected batches: add their missing lines to the ledger"), permissions=["resolve"]
    )
    def accept(self, request: HttpRequest, queryset: QuerySet[QuarantinedBatch]) -> HttpResponse | None:
        """Show the lines that the ledger does not have. When the user confirms, add these lines to the ledger."""
        meaning = _("The missing lines are added to the ledger, and reports bill them.")
        return self._resolve(request, queryset, resolve.accept, str(_("Accept")), str(meaning))

    @admin.action(description=_("Discard the selected batches: leave the ledger as it is"), permissions=["resolve"])
    def discard(self, request: HttpRequest, queryset: QuerySet[QuarantinedBatch]) -> HttpResponse | None:
        """Show the lines that the ledger does not have. When the user confirms, discard the batches."""
        meaning = _("The ledger stays as it is: the missing lines are never billed.")
        return self._resolve(request, queryset, resolve.discard, str(_("Discard")), str(meaning))

    def _resolve(
        self,
        request: HttpRequest,
        queryset: QuerySet[QuarantinedBatch],
        action: Callable[[str, int, str], str],
        title: str,
        meaning: str,
    ) -> HttpResponse | None:
        batches = queryset.order_by("arrived_at", "pk")
        if not request.POST.get("post"):
            context = {
                **self.admin_site.each_context(request),
                "opts": self.model._meta,
                "title": title,
                "meaning": meaning,
                "batches": [(quarantined, self.missing_lines(quarantined)) for quarantined in batches],
                "action": request.POST["action"],
                "chosen": ACTION_CHECKBOX_NAME,
            }
            return TemplateResponse(request, "ratelimits/admin/resolve_batches.html", context)
        for quarantined in batches:
            try:
                resolution = action(queryset.db, quarantined.pk, request.user.get_username())
            except resolve.UnresolvableError as error:
                self.message_user(request, f"{quarantined}: {error}", messages.ERROR)
                continue
            self.log_change(request, quarantined, resolution)
            self.message_user(request, f"{quarantined}: {resolution}", messages.SUCCESS)
        return None


@admin.register(ArchivedRange)
class ArchivedRangeAdmin(ReadOnlyAdmin):
    """The ranges of batches that were moved to archives."""

    list_display = ["archive", "shard", "first_position", "last_position", "archived_at", "restored_at"]
    list_filter = [ShardFilter]
    readonly_fields = ["archived_at"]
