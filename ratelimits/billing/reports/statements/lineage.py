"""Find where a report line comes from: edits of its rule and of the account's terms, ledger lines, and batches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db.models import Q, QuerySet

from ratelimits.billing.models import PlanPrice, Report, ReportLine
from ratelimits.billing.reports.build import between
from ratelimits.billing.reports.rows import USAGE
from ratelimits.billing.reports.terms import record_at
from ratelimits.models import Account, KeyOverride, Plan, PlanInclusion, Rule
from ratelimits.models.accounts.named import NamedCustomer, TextSpan, of_tokens
from ratelimits.usage.models import Batch, Line
from ratelimits.usage.periods import SECOND, in_spans

#: What an edit did, by the type of its history record.
_DID = {"+": "added", "~": "changed", "-": "deleted"}


@dataclass(frozen=True, slots=True)
class RecordedEdit:
    """A change of a row of the configuration."""

    version: int
    #: The kind of the row, such as "rule".
    kind: str
    #: The text that names the row.
    row: str
    #: "added", "changed" or "deleted".
    did: str
    at: datetime
    #: The user; "" if nobody was logged in.
    who: str
    reason: str


def rule_edits(line: ReportLine, using: str) -> Iterator[RecordedEdit]:
    """Yield the edits with the version that the line shows for its rule: edits of the rule, and of its overrides."""
    if not line.rule_version:
        return
    accounts = [f"account:{text}" for text in customer_of(line, using).texts]
    for model, condition in (
        # Search by name too: the version can come from the deletion of another rule with this name.
        (Rule, Q(id=line.rule_id) | Q(name=line.rule)),
        (KeyOverride, Q(rule=line.rule, key__in=(line.key, *accounts))),
    ):
        history: Any = model.history
        records = history.using(using).filter(condition, version=line.rule_version).order_by("history_id")
        for record in records.prefetch_related("history_user"):
            yield _edit(model, record)


def terms_edits(line: ReportLine, using: str) -> Iterator[RecordedEdit]:
    """Yield the last edits before the period's end (see `_account_edits`), and the edit that set the line's price.

    Perhaps this price belongs to a plan that the account no longer had at the end of the period.
    """
    yield from _account_edits(line, using)
    yield from _price_edits(line, using)


def _account_edits(line: ReportLine, using: str) -> Iterator[RecordedEdit]:
    """Yield the last edits before the end of the period: of the account, its plan, and the plan's included quantity."""
    at = line.report.period_end - 1
    customer, history = customer_of(line, using).pk, Account.history
    pks = history.using(using).filter(customer=customer).order_by("id").values_list("id", flat=True).distinct()
    records = (record_at(Account, using, at, id=pk) for pk in pks)
    account = next((record for record in records if record is not None and record.customer_id == customer), None)
    if account is None:
        return
    yield _edit(Account, account)
    plan = record_at(Plan, using, at, id=account.plan_id) if account.plan_id else None
    if plan is None:
        return
    yield _edit(Plan, plan)
    included = record_at(PlanInclusion, using, at, plan_id=account.plan_id, meter=line.meter)
    if included is not None:
        yield _edit(PlanInclusion, included)


def _price_edits(line: ReportLine, using: str) -> Iterator[RecordedEdit]:
    """Yield the edit that set the line's price."""
    prices = line.report.prices.get("periods", {}).get(str(line.usage_period), {}).get("meters", {})
    if line.meter in prices:
        price, history = prices[line.meter], PlanPrice.history
        for record in history.using(using).filter(id=price["id"], version=price["version"]):
            yield _edit(PlanPrice, record)


def _edit(model: Any, record: Any) -> RecordedEdit:
    return RecordedEdit(
        version=record.version,
        kind=str(model._meta.verbose_name),
        # `str(rule)` contains the name of the rule's plan, but perhaps this plan was deleted.
        row=record.name if model is Rule else str(record.instance),
        did=_DID[record.history_type],
        at=record.history_date,
        who=str(record.history_user or ""),
        reason=record.history_change_reason or getattr(record, "reason", ""),
    )


def ledger_lines(line: ReportLine, using: str) -> QuerySet[Line]:
    """Return the ledger lines from which a report line was made. An adjustment has no ledger lines."""
    report = line.report
    since = report.since.get(str(line.usage_period))
    if since is None or line.charge_category != USAGE:
        return Line.objects.using(using).none()
    rows = Line.objects.using(using).filter(in_spans(spans_of(line, using)), between(since, report.chain))
    return rows.filter(key=line.key, meter=line.meter, rule=line.rule_id, version=line.rule_version)


def customer_of(line: ReportLine, using: str) -> NamedCustomer:
    """Return the customer who owes a report line."""
    return of_tokens(using, [line.report.customer_id])[line.report.customer_id]


def spans_of(line: ReportLine, using: str) -> list[TextSpan]:
    """Return the account texts of the customer in the billing period of a line's usage, each with its span."""
    return customer_of(line, using).spans(line.usage_period * SECOND, _end_of(line, using) * SECOND)


def _end_of(line: ReportLine, using: str) -> int:
    """Return the end (s since 1970 UTC) of the billing period to which the usage of a line belongs."""
    start = line.usage_period * SECOND
    if start == line.report.period_start:
        return line.report.period_end // SECOND
    versions = Report.objects.using(using).filter(customer__token=line.report.customer_id, period_start=start)
    return max(versions.values_list("period_end", flat=True), default=start) // SECOND


def batches(line: ReportLine, using: str) -> QuerySet[Batch]:
    """Return the batches of a report line's ledger lines, in the order of their shards' chains."""
    pks = ledger_lines(line, using).order_by().values("batch")
    return Batch.objects.using(using).filter(pk__in=pks).order_by("shard", "position")
