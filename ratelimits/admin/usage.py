"""The ledger in the admin: read by people, written by workers; people resolve what is in quarantine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext_lazy as _

from ratelimits.admin.readonly import ReadOnlyAdmin
from ratelimits.models import ArchivedRange, Batch, DurabilityGap, Line, PeriodUsage, QuarantinedBatch, ShardState
from ratelimits.models.ledger import moment
from ratelimits.usage import resolve
from ratelimits.usage.packet import values

#: Lines of a quarantined batch that its page shows at most.
_MAX_ROWS = 50


def shown(microseconds: int) -> str:
    """A moment in µs since 1970 as people read it."""
    return f"{moment(microseconds):%Y-%m-%d %H:%M:%S} UTC" if microseconds else "–"


def link_to_lines(site: admin.AdminSite, **about: object) -> str:
    """A link to the ledger lines that have these values."""
    url = reverse(f"{site.name}:ratelimits_line_changelist")
    return format_html('<a href="{}?{}">{}</a>', url, urlencode(about), _("Ledger lines"))


def accounts_and_keys(term: str) -> Iterator[dict[str, str]]:
    """What a search may mean, as conditions: an account, or one and a key behind a space; either may have spaces."""
    yield {"account": term}
    for space in (place for place, letter in enumerate(term) if letter == " "):
        yield {"account": term[:space], "key": term[space + 1 :]}


class ShardFilter(admin.SimpleListFilter):
    """By shard, without a look through the whole table for which there are."""

    title = _("shard")
    parameter_name = "shard"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[Any, str]]:
        shards = ShardState.objects.order_by("shard").filter(position__gt=0)
        return [(shard, f"{shard:02d}") for shard in shards.values_list("shard", flat=True)]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        chosen = self.value()
        known = chosen is not None and chosen.isascii() and chosen.isdecimal() and len(chosen) <= 5
        return queryset.filter(shard=chosen) if known else queryset


@admin.register(ShardState)
class ShardStateAdmin(ReadOnlyAdmin):
    """Where the ledger stands."""

    list_display = ["__str__", "complete_until", "position", "seq", "frozen"]
    list_filter = ["frozen"]
    readonly_fields = ["complete_until"]

    @admin.display(description=_("complete until"), ordering="watermark")
    def complete_until(self, state: ShardState) -> str:
        """The watermark."""
        return shown(state.watermark)


@admin.register(Batch)
class BatchAdmin(ReadOnlyAdmin):
    """The batches in the ledger."""

    list_display = ["__str__", "position", "line_count", "sealed", "fence", "applied_at"]
    list_filter = [ShardFilter]
    search_fields = ["incarnation"]  # get_search_results says how
    search_help_text = _("An incarnation, whole: of 00:3f9c:17 it is 3f9c.")
    sortable_by = ()
    exclude = ["opened_at", "sealed_at"]
    readonly_fields = ["opened", "sealed", "applied_at", "ledger_lines"]

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Batches of an incarnation, looked up in each shard: the incarnation alone has no index."""
        if not search_term:
            return queryset, False
        shards = ShardState.objects.using(queryset.db).values_list("shard", flat=True)
        return queryset.filter(shard__in=list(shards), incarnation=search_term), False

    @admin.display(description=_("opened"))
    def opened(self, batch: Batch) -> str:
        """When it was opened."""
        return shown(batch.opened_at)

    @admin.display(description=_("sealed"))
    def sealed(self, batch: Batch) -> str:
        """When it was sealed."""
        return shown(batch.sealed_at)

    @admin.display(description=_("its lines"))
    def ledger_lines(self, batch: Batch) -> str:
        """A link to them."""
        first, end = batch.line_ids()
        return link_to_lines(self.admin_site, id__gte=first, id__lt=end)


@admin.register(Line)
class LineAdmin(ReadOnlyAdmin):
    """The ledger, line by line."""

    list_display = ["start", "account", "key", "meter", "admitted_units", "denied_requests", "refunded_units", "batch"]
    list_select_related = ["batch"]
    search_fields = ["account"]  # get_search_results says how
    search_help_text = _("An account, or an account, a space and a key; each whole. At most 10,000 lines are listed.")
    sortable_by = ()
    ordering = ["-id"]
    readonly_fields = ["start"]

    @admin.display(description=_("15 minutes from"))
    def start(self, line: Line) -> str:
        """The start of its bin."""
        return f"{moment(line.bin * 1_000_000):%Y-%m-%d %H:%M} UTC"

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Any], search_term: str
    ) -> tuple[QuerySet[Any], bool]:
        """Lines of an account, or of a key in it, found by the billing periods that the account has usage in.

        The account alone has no index, nor has the key.
        """
        if not search_term:
            return queryset, False
        for about in accounts_and_keys(search_term):
            periods = PeriodUsage.objects.using(queryset.db).filter(account=about["account"]).order_by()
            starts = list(periods.values_list("period", flat=True).distinct())
            if starts:
                return queryset.filter(**about, period__in=starts), False
        return queryset.none(), False


@admin.register(PeriodUsage)
class PeriodUsageAdmin(ReadOnlyAdmin):
    """What accounts have used of their billing periods."""

    list_display = [
        "account",
        "starts",
        "meter",
        "rule",
        "admitted_units",
        "refunded_units",
        "denied_requests",
        "closed",
    ]
    search_fields = ["account__exact"]
    search_help_text = _("An account, whole.")
    sortable_by = ()
    ordering = ["-period", "-id"]
    readonly_fields = ["starts"]

    @admin.display(description=_("billing period"))
    def starts(self, usage: PeriodUsage) -> str:
        """When the period starts."""
        return f"{moment(usage.period * 1_000_000):%Y-%m-%d %H:%M} UTC"

    @admin.display(description=_("finalised"), boolean=True)
    def closed(self, usage: PeriodUsage) -> bool:
        """Whether a report has it."""
        return usage.covered is not None and usage.covered >= usage.position


@admin.register(DurabilityGap)
class DurabilityGapAdmin(ReadOnlyAdmin):
    """What may be missing."""

    list_display = ["kind", "shard", "account", "from_", "to", "fsync", "units", "recovered_at"]
    list_filter = ["kind"]
    search_fields = ["account__exact"]
    search_help_text = _("An account, whole.")
    sortable_by = ()
    exclude = ["since", "until"]
    readonly_fields = ["from_", "to", "declared_at"]

    @admin.display(description=_("from"))
    def from_(self, gap: DurabilityGap) -> str:
        """Since when."""
        return shown(gap.since)

    @admin.display(description=_("to"))
    def to(self, gap: DurabilityGap) -> str:
        """Until when."""
        return shown(gap.until)


@admin.register(QuarantinedBatch)
class QuarantinedBatchAdmin(ReadOnlyAdmin):
    """Batches that somebody must look at: each holds its shard's watermark."""

    list_display = ["__str__", "reason", "arrived_at", "resolution"]
    list_filter = [("resolved_at", admin.EmptyFieldListFilter)]
    actions = ["accept", "discard"]
    readonly_fields = ["lacking", "arrived_at"]
    fields = ["shard", "name", "reason", "arrived_at", "lacking", "resolution", "resolved_at", "content", "fields"]

    def has_resolve_permission(self, request: HttpRequest) -> bool:
        """Whether the user may change quarantined batches."""
        user: Any = request.user
        return bool(user.has_perm("ratelimits.change_quarantinedbatch"))

    @admin.display(description=_("what the ledger lacks of it"))
    def lacking(self, kept: QuarantinedBatch) -> str:
        """The lines that accepting it would add."""
        if kept.resolved_at is not None:
            return "–"
        try:
            lines = resolve.lacking(kept._state.db or "default", kept)
        except resolve.UnresolvableError as error:
            return str(error)
        rows = [values(line) for line in lines[:_MAX_ROWS]]
        listed = format_html_join("", "<div>{} {}: {} {}</div>", ((row[0], row[1], row[8], row[2]) for row in rows))
        more = (
            format_html("<div>{}</div>", _("%(n)d lines in all") % {"n": len(lines)}) if len(lines) > _MAX_ROWS else ""
        )
        return format_html("{}{}", listed, more) if lines else str(_("Nothing: the ledger has all of it."))

    @admin.action(description=_("Accept: add what the ledger lacks of them"), permissions=["resolve"])
    def accept(self, request: HttpRequest, queryset: QuerySet[QuarantinedBatch]) -> HttpResponse | None:
        """Resolve them by adding what is in them and not in the ledger, once that was shown."""
        meaning = _("The ledger gets what it lacks of them, and the reports bill it.")
        return self._resolve(request, queryset, resolve.accept, str(_("Accept")), str(meaning))

    @admin.action(description=_("Discard: the ledger stays as it is"), permissions=["resolve"])
    def discard(self, request: HttpRequest, queryset: QuerySet[QuarantinedBatch]) -> HttpResponse | None:
        """Resolve them by leaving them out, once it was shown what that is."""
        meaning = _("The ledger stays as it is: what it lacks of them is never billed.")
        return self._resolve(request, queryset, resolve.discard, str(_("Discard")), str(meaning))

    def _resolve(
        self,
        request: HttpRequest,
        queryset: QuerySet[QuarantinedBatch],
        way: Callable[[str, int, str], str],
        title: str,
        meaning: str,
    ) -> HttpResponse | None:
        every = queryset.order_by("arrived_at", "pk")
        if not request.POST.get("post"):
            context = {
                **self.admin_site.each_context(request),
                "opts": self.model._meta,
                "title": title,
                "meaning": meaning,
                "batches": [(kept, self.lacking(kept)) for kept in every],
                "action": request.POST["action"],
                "chosen": ACTION_CHECKBOX_NAME,
            }
            return TemplateResponse(request, "ratelimits/admin/resolve_batches.html", context)
        for kept in every:
            try:
                resolution = way(queryset.db, kept.pk, request.user.get_username())
            except resolve.UnresolvableError as error:
                self.message_user(request, f"{kept}: {error}", messages.ERROR)
                continue
            self.log_change(request, kept, resolution)
            self.message_user(request, f"{kept}: {resolution}", messages.SUCCESS)
        return None


@admin.register(ArchivedRange)
class ArchivedRangeAdmin(ReadOnlyAdmin):
    """What was moved to archives."""

    list_display = ["archive", "shard", "first_position", "last_position", "archived_at"]
    list_filter = [ShardFilter]
    readonly_fields = ["archived_at"]
