"""Where a report line comes from: the edits behind its rule and its terms, its ledger lines, the batches of those."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Q, QuerySet

from ratelimits.models import Account, Batch, KeyOverride, Line, Plan, PlanInclusion, PlanPrice, ReportLine, Rule
from ratelimits.reports.amounts import home
from ratelimits.reports.build import between
from ratelimits.reports.rows import USAGE
from ratelimits.reports.terms import then

_DID = {"+": "added", "~": "changed", "-": "deleted"}


@dataclass(frozen=True, slots=True)
class RecordedEdit:
    """What was done to a row of the configuration, when, and by whom ("" if nobody was logged in)."""

    version: int
    kind: str
    row: str
    did: str
    at: datetime
    who: str
    reason: str


def rule_edits(line: ReportLine, using: str) -> Iterator[RecordedEdit]:
    """The edits with the line's rule version that shaped its rule: of the rule, of an override of it, or both."""
    if not line.rule_version:
        return
    key, account = line.key, f"account:{line.report.account}"
    for model, about in (
        (Rule, Q(id=line.rule_id) | Q(name=line.rule)),
        (KeyOverride, Q(rule=line.rule, key__in=(key, account))),
    ):
        history: Any = model.history
        records = history.using(using).filter(about, version=line.rule_version).order_by("history_id")
        for record in records.prefetch_related("history_user"):
            yield _edit(model, record)


def terms_edits(line: ReportLine, using: str) -> Iterator[RecordedEdit]:
    """The edits that made the terms what they were when the billing period ended: account, plan, included, price."""
    at = line.report.period_end - 1
    account = then(Account, using, at, identifier=line.report.account) if line.report.account else None
    if account is None:
        return
    yield _edit(Account, account)
    plan = then(Plan, using, at, id=account.plan_id) if account.plan_id else None
    if plan is None:
        return
    yield _edit(Plan, plan)
    included = then(PlanInclusion, using, at, plan_id=account.plan_id, meter=line.meter)
    if included is not None:
        yield _edit(PlanInclusion, included)
    yield from _price_edits(line, using)


def _price_edits(line: ReportLine, using: str) -> Iterator[RecordedEdit]:
    """The edit that made the price what the report recorded."""
    period = home(line.report, str(line.usage_period))
    prices = line.report.prices.get("periods", {}).get(period, {}).get("meters", {})
    if line.meter in prices:
        price, history = prices[line.meter], PlanPrice.history
        for record in history.using(using).filter(id=price["id"], version=price["version"]):
            yield _edit(PlanPrice, record)


def _edit(model: Any, record: Any) -> RecordedEdit:
    return RecordedEdit(
        version=record.version,
        kind=str(model._meta.verbose_name),
        # A rule's own text names its plan, which may be gone.
        row=record.name if model is Rule else str(record.instance),
        did=_DID[record.history_type],
        at=record.history_date,
        who=str(record.history_user or ""),
        reason=record.history_change_reason or getattr(record, "reason", ""),
    )


def ledger_lines(line: ReportLine, using: str) -> QuerySet[Line]:
    """The ledger lines that a report line is the sum of; none for what a person adjusted."""
    report = line.report
    since = report.since.get(str(line.usage_period))
    if since is None or line.charge_category != USAGE:
        return Line.objects.using(using).none()
    about = {"account": report.account, "key": line.key, "meter": line.meter}
    found = Line.objects.using(using).filter(**about, period=line.usage_period, rule=line.rule_id)
    return found.filter(between(since, report.chain), version=line.rule_version)


def batches(line: ReportLine, using: str) -> QuerySet[Batch]:
    """The batches of those ledger lines, in the order of their shard's chain."""
    numbers = ledger_lines(line, using).order_by().values("batch")
    return Batch.objects.using(using).filter(pk__in=numbers).order_by("shard", "position")
