"""Plans in the admin, with their prices."""

from __future__ import annotations

from django.contrib import admin

from ratelimits.admin.accounts import PlanAdmin
from ratelimits.admin.typed import TypedNumbers
from ratelimits.billing.models import PlanPrice
from ratelimits.models import Plan


class PlanPriceInline(TypedNumbers, admin.StackedInline):  # type: ignore[type-arg]
    """The prices of a plan."""

    model = PlanPrice
    extra = 0
    fields = ["meter", "pricing", "unit_price", "tiers", "flat_fee", "minimum", "fees_due"]


class PricedPlanAdmin(PlanAdmin):
    """Plans with their prices too, and the currency of these."""

    fields = ["name", "slug", "currency", "rules_listed"]
    inlines = [*PlanAdmin.inlines, PlanPriceInline]


# If the project has a page of its own, that page stays.
if type(admin.site._registry.get(Plan)) is PlanAdmin:
    admin.site.unregister(Plan)
    admin.site.register(Plan, PricedPlanAdmin)
