"""Accounts, usage and closings, for the tests of the report wing."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from ratelimits import engine
from ratelimits.models import Account, ConfigVersion, Plan, PlanInclusion, Report, ReportLine, ShardState
from ratelimits.reports.closing.close import finalise
from tests.support.usage.traffic import at, flow, opened_late, use


def account(identifier: str = "acme", *, included: int | None = None, **fields: Any) -> Account:
    """An account, of old, whose plan includes so many requests."""
    plan = None
    if included is not None:
        plan = Plan.objects.create(name=f"Plan of {identifier}", slug=f"plan-{identifier}")
        PlanInclusion.objects.create(plan=plan, meter="requests", quantity=included)
    created = Account.objects.create(identifier=identifier, plan=plan, **fields)
    for model in (Account, Plan, PlanInclusion):
        QuerySet(model).update(since=0)
        model.history.update(since=0)
    return created


def spend(payer: Account | str, moment: str, cost: int = 1, **about: Any) -> engine.Decision:
    """One request of an account at a moment like "2026-10-31T23:59"."""
    terms: dict[str, Any] = {}
    if isinstance(payer, Account):
        terms = {"timezone": payer.timezone, "anchor": payer.billing_anchor or None}
        payer = payer.identifier
    return use(payer, cost=cost, now=at(moment), configuration=ConfigVersion.read("default")[0], **terms, **about)


def close(watermark: str | None = None) -> list[Report]:
    """Drain, say that all usage before a moment is in the ledger, and finalise as if it were then."""
    opened_late()
    flow()
    if watermark is not None:
        ShardState.objects.update(watermark=at(watermark))
    return finalise(at(watermark) if watermark is not None else None)


def lines(report: Report) -> list[dict[str, Any]]:
    """What a version brought in, in short."""
    rows = ReportLine.objects.filter(report=report).order_by("number")
    columns = ("charge_class", "consumed_quantity", "included_quantity", "overage_quantity", "refunded_quantity")
    return [dict(row) for row in rows.values(*columns)]
