"""Plans, memberships and accounts in the admin."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from django.contrib import admin
from django.contrib.admin.utils import unquote
from django.db.models import Count, Model, OuterRef, Q, QuerySet, Subquery
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext_lazy as _

from ratelimits.admin.audited import AuditedAdmin, InForceFilter
from ratelimits.admin.changes.page import PER_PAGE, shown_change
from ratelimits.admin.changes.rows import changed_rows
from ratelimits.admin.inspected import InspectedAdmin
from ratelimits.admin.operate.confirming import AsksBeforeSaving
from ratelimits.admin.row_files.page import RowFiles
from ratelimits.admin.suggestions import KeySuggestions, RowSuggestions
from ratelimits.admin.typed import MOMENTS, TypedNumbers, local_time, primary_key
from ratelimits.algorithms import calendar
from ratelimits.algorithms.base import amount
from ratelimits.conf import conf
from ratelimits.models import Account, Plan, PlanInclusion, PlanMembership, Rule
from ratelimits.models.accounts import plan_parts
from ratelimits.models.accounts.named import former_accounts
from ratelimits.models.periods import periods_after, plan_changes
from ratelimits.quota.counting import counting


def _count_of(model: type[Model]) -> Coalesce:
    """Return an expression for a query of plans: for each plan, the number of rows of `model` that refer to it."""
    rows = model._default_manager.filter(plan=OuterRef("pk")).order_by().values("plan")
    return Coalesce(Subquery(rows.annotate(total=Count("*")).values("total")), 0)


class PlanInclusionInline(TypedNumbers, admin.TabularInline):  # type: ignore[type-arg]
    """The quantities that a plan includes."""

    model = PlanInclusion
    extra = 1


@admin.register(Plan)
class PlanAdmin(AsksBeforeSaving, AuditedAdmin):
    """Plans with their included quantities, prices and rules."""

    list_display = ["name", "slug", "included", "rule_count", "key_count", "account_count"]
    search_fields = ["name", "slug"]
    prepopulated_fields = {"slug": ["name"]}
    readonly_fields = ["rules_listed"]
    fields = ["name", "slug", "rules_listed"]
    inlines = [PlanInclusionInline]
    object_history_template = "ratelimits/admin/plan_history.html"

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the fields. Only users who may view rules see the plan's rules."""
        rules = self.admin_site.get_model_admin(Rule)
        may_view = rules.has_view_permission(request)
        return [name for name in super().get_fields(request, obj) if may_view or name != "rules_listed"]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Plan]:
        plans: QuerySet[Plan] = super().get_queryset(request).prefetch_related("inclusions")
        # A subquery counts each of the three tables. A join of all three would have a row for each combination of a
        # rule, a key and an account.
        return plans.annotate(
            rule_total=_count_of(Rule), key_total=_count_of(PlanMembership), account_total=_count_of(Account)
        )

    def billed_accounts(self, row: Plan) -> Collection[str]:
        """Return the accounts on the plan. A new plan has none."""
        return () if row._state.adding else list(Account.objects.filter(plan=row).values_list("identifier", flat=True))

    def effect_of(self, request: HttpRequest, row: Plan) -> tuple[list[str], list[str]]:
        """Return no sentences. If an undo adds a deleted plan again, return a warning about what does not come back."""
        if not row._state.adding:
            return [], []
        text = _("The plan comes back without its included quantities and prices: add them on the plan's page.")
        return [], [str(text)]

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the plan's history, and below it the newest changes of the plan's included quantities and prices."""
        pk = primary_key(Plan, unquote(object_id))
        rows = changed_rows(plan_parts(), until=None, skip=0, count=PER_PAGE + 1, chosen=Q(plan=pk))
        context = {
            "changes": [shown_change(self.admin_site, request, row) for row in rows[:PER_PAGE]],
            # 0 if the page shows all changes.
            "changes_shown": PER_PAGE if len(rows) > PER_PAGE else 0,
        }
        return super().history_view(request, object_id, {**context, **(extra_context or {})})

    @admin.display(description=_("included"))
    def included(self, plan: Plan) -> str:
        """Return the quantities that each billing period includes."""
        return ", ".join(amount(inclusion.quantity, inclusion.meter) for inclusion in plan.inclusions.all()) or "–"

    @admin.display(description=_("rules"), ordering="rule_total")
    def rule_count(self, plan: Any) -> int:
        """Return the number of the plan's rules."""
        return int(plan.rule_total)

    @admin.display(description=_("keys"), ordering="key_total")
    def key_count(self, plan: Any) -> int:
        """Return the number of keys on the plan."""
        return int(plan.key_total)

    @admin.display(description=_("accounts"), ordering="account_total")
    def account_count(self, plan: Any) -> int:
        """Return the number of accounts on the plan."""
        return int(plan.account_total)

    @admin.display(description=_("rules"))
    def rules_listed(self, plan: Plan | None) -> str:
        """Return a list of the plan's rules, as HTML. Each item is a rule's sentence, with a link to the rule.

        The last item is a link that adds a rule. Return "–" for a plan that is not saved.
        """
        if plan is None or plan.pk is None:
            return "–"
        add = reverse(f"{self.admin_site.name}:ratelimits_rule_add") + f"?plan={plan.pk}"
        rows = [
            (reverse(f"{self.admin_site.name}:ratelimits_rule_change", args=[rule.pk]), rule.name, rule.sentence())
            for rule in plan.rules.all()
        ]
        items = format_html_join("", '<li><a href="{}">{}</a>: {}</li>', rows)
        return format_html('<ul>{}<li><a href="{}">{}</a></li></ul>', items, add, _("Add a rule"))


@admin.register(PlanMembership)
class PlanMembershipAdmin(KeySuggestions, InspectedAdmin, RowFiles, RowSuggestions, AuditedAdmin):
    """The keys that are on plans."""

    list_display = ["key", "plan", "valid_from", "valid_until"]
    list_filter = [InForceFilter, "plan"]
    list_select_related = ["plan"]
    search_fields = ["key", "plan__name"]
    autocomplete_fields = ["plan"]
    fields = ["key", "plan", "valid_from", "valid_until"]
    formfield_overrides = MOMENTS

    def inspected(self, row: PlanMembership) -> tuple[str, str]:
        """Return the key for the inspector, and "" as the account, because a membership names no account."""
        return row.key, ""


@admin.register(Account)
class AccountAdmin(InspectedAdmin, RowFiles, RowSuggestions, AsksBeforeSaving, AuditedAdmin):
    """The accounts, each with its time zone and plan."""

    list_display = ["identifier", "name", "plan", "timezone", "billing_anchor"]
    list_filter = ["plan"]
    list_select_related = ["plan"]
    search_fields = ["identifier", "name"]
    autocomplete_fields = ["plan", "next_plan"]
    fields = ["identifier", "name", "plan", "next_plan", "next_plan_from", "timezone", "billing_anchor"]
    readonly_fields = ["next_plan_from"]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the fields. What counts usage also begins next plans, so other projects have no such field."""
        of_usage = set() if counting.counts else {"next_plan", "next_plan_from"}
        return [name for name in super().get_fields(request, obj) if name not in of_usage]

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the fields without inputs. The identifier of an account can only be moved."""
        names = super().get_readonly_fields(request, obj)
        return names if obj is None else [*names, "identifier"]

    def save_model(self, request: HttpRequest, obj: Account, form: Any, change: bool) -> None:
        plan_changes.schedule(obj)
        request.periods_after = self._periods_after(obj)  # type: ignore[attr-defined]
        super().save_model(request, obj, form, change)

    @admin.display(description=_("next plan from"))
    def next_plan_from(self, account: Account) -> str:
        """Return the moment at which the next plan begins, in the time zone of the account."""
        if account.next_plan_at is None:
            return "–"
        try:
            zone = calendar.zone(account.timezone)
        except ValueError:
            return local_time(account.next_plan_at)
        return f"{account.next_plan_at.astimezone(zone):%Y-%m-%d %H:%M} {account.timezone}"

    def doubts(self, request: HttpRequest, row: Account, *, is_new: bool) -> list[str]:
        """Return a sentence about a deleted account with the same text, and where the next billing period will lie."""
        former = former_accounts(conf.DATABASE, [row.identifier]).values() if is_new else ()
        return [*former, *request.periods_after]  # type: ignore[attr-defined]

    def effect_of(self, request: HttpRequest, row: Account) -> tuple[list[str], list[str]]:
        """Return no sentences, and warnings that say where the next billing period will lie."""
        return [], self._periods_after(row)

    def _periods_after(self, row: Account) -> list[str]:
        return periods_after(conf.DATABASE, [row]).get(row.identifier, [])

    def billed_accounts(self, row: Account) -> Collection[str]:
        """Return the account's identifier."""
        return [row.identifier]

    def inspected(self, row: Account) -> tuple[str, str]:
        """Return the key for the inspector, and "" as the account, because the key already names the account."""
        return row.key, ""
