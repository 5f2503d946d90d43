"""Make accounts, usage and closings, for the tests of reports."""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from ratelimits import engine
from ratelimits.billing.models import Report, ReportLine
from ratelimits.billing.reports.closing.close import finalise
from ratelimits.models import Account, ConfigVersion, Name, Plan, PlanInclusion
from ratelimits.usage.models import ShardState
from tests.support.usage.traffic import at, flow, opened_late, use


def account(identifier: str = "acme", *, included: int | None = None, **fields: Any) -> Account:
    """Make an account, in the past, whose plan includes this number of requests."""
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
    """Make one request of an account at a time like "2026-10-31T23:59"."""
    payer = payer.identifier if isinstance(payer, Account) else payer
    return use(payer, cost=cost, now=at(moment), configuration=ConfigVersion.read("default")[0], **about)


def close(watermark: str | None = None) -> list[Report]:
    """Drain, set the watermark to a moment, and finalise as if it was that moment now."""
    opened_late()
    flow()
    if watermark is not None:
        ShardState.objects.update(watermark=at(watermark))
    return finalise(at(watermark) if watermark is not None else None)


def token(text: str = "acme") -> str:
    """Return the token of the customer that has this account text."""
    return Name.objects.get(identifier=text, until=None).customer.token


def lines(report: Report) -> list[dict[str, Any]]:
    """Return the lines that a version added, in short form."""
    rows = ReportLine.objects.filter(report=report).order_by("number")
    columns = ("charge_class", "consumed_quantity", "included_quantity", "overage_quantity", "refunded_quantity")
    return [dict(row) for row in rows.values(*columns)]
