"""Ledger lines to report rows: streamed, in an order that depends on nothing but what the ledger says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from django.db.models import Max, Min, Q, Sum

from ratelimits.conf import conf
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.models import Line
from ratelimits.reports.gaps import Gaps
from ratelimits.reports.lineage import RuleBook, Terms, TermsBook
from ratelimits.reports.periods import SECOND, month_window, period_from, starts_in
from ratelimits.reports.rows import PROVISIONAL, USAGE, Row, line_id, report_id

#: What the lines of one row have in common, and the order of rows.
GROUP = ("account", "period", "meter", "key", "rule", "version")
_SUMS = ("admitted_requests", "admitted_units", "denied_requests", "refunded_units")
_CHUNK = 2000


def grouped(using: str, condition: Q) -> Iterator[dict[str, Any]]:
    """The sums of ledger lines by GROUP, streamed in that order, with their first and last bins and batches."""
    lines = Line.objects.using(using).filter(condition).values(*GROUP).order_by(*GROUP)
    sums: Iterator[dict[str, Any]] = lines.annotate(
        **{name: Sum(name) for name in _SUMS},
        first_bin=Min("bin"),
        last_bin=Max("bin"),
        first_shard=Min("batch__shard"),
        last_shard=Max("batch__shard"),
        first_position=Min("batch__first_position"),
        last_position=Max("batch__position"),
    ).iterator(chunk_size=_CHUNK)
    return sums


def provisional(month: str, *, account: str | None = None, using: str | None = None) -> Iterator[Row]:
    """The rows of all billing periods that start in a month like "2026-11", from what the ledger holds now.

    Of one account, or of all; memory stays bounded. Raises ValueError for what is no month.
    """
    using = using or conf.DATABASE
    start, end = month_window(month)
    condition = Q(period__gte=start // SECOND, period__lt=end // SECOND)
    if account is not None:
        condition &= Q(account=account)
    return _rows(using, month, condition, start, end)


def _rows(using: str, month: str, condition: Q, start: int, end: int) -> Iterator[Row]:
    terms, rules = TermsBook(using), RuleBook(using)
    gaps = Gaps.between(using, start, end + 32 * 86400 * SECOND)
    allowance: dict[str, int] = {}
    report = None
    for group, held in _with_terms(grouped(using, condition), terms):
        if not starts_in(month, group["period"] * SECOND, held.timezone):
            continue
        if report != (group["account"], group["period"]):
            report = group["account"], group["period"]
            allowance = dict(held.included)
        yield _row(group, held, rules, gaps, allowance)


def _with_terms(groups: Iterable[dict[str, Any]], book: TermsBook) -> Iterator[tuple[dict[str, Any], Terms]]:
    groups = iter(groups)
    while chunk := list(islice(groups, _CHUNK)):
        terms = book.of({group["account"] for group in chunk})
        for group in chunk:
            yield group, terms[group["account"]]


def _row(group: dict[str, Any], terms: Terms, rules: RuleBook, gaps: Gaps, allowance: dict[str, int]) -> Row:
    period = period_from(terms.timezone, terms.anchor, group["period"] * SECOND)
    name = report_id(group["account"], period.start)
    rule = rules.of(group["rule"], group["version"])
    billable = group["admitted_units"] - group["refunded_units"]
    included = min(max(billable, 0), allowance.get(group["meter"], 0))
    if included:
        allowance[group["meter"]] -= included
    return Row(
        report_id=name,
        report_version=0,
        status=PROVISIONAL,
        line_id=line_id(name, USAGE, group["meter"], group["key"], group["rule"], group["version"]),
        account=group["account"],
        key=group["key"],
        meter=group["meter"],
        unit=conf.UNITS.get(group["meter"], group["meter"]),
        charge_category=USAGE,
        charge_class="",
        corrects_line_id="",
        billing_period_start=period.start,
        billing_period_end=period.end,
        charge_period_start=max(group["first_bin"] * SECOND, period.start),
        charge_period_end=min((group["last_bin"] + BIN_SECONDS) * SECOND, period.end),
        timezone=period.timezone,
        consumed_quantity=group["admitted_units"],
        included_quantity=included,
        overage_quantity=billable - included,
        refunded_quantity=group["refunded_units"],
        admitted_count=group["admitted_requests"],
        denied_count=group["denied_requests"],
        unknown_count=0,
        limit=rule.limit,
        rule=rule.name,
        rule_version=group["version"],
        plan=terms.plan,
        batch_range=batch_range(group),
        durability_gap=gaps.text(group["first_shard"], group["account"], period.start, period.end),
    )


def batch_range(group: dict[str, Any]) -> str:
    """Shard and positions of the batches: "07:12-45"."""
    shard = f"{group['first_shard']:02d}"
    if group["last_shard"] != group["first_shard"]:
        return f"{shard}…{group['last_shard']:02d}"
    first, last = group["first_position"], group["last_position"]
    return f"{shard}:{first}" if first == last else f"{shard}:{first}-{last}"
