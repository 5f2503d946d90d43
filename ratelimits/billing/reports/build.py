"""Compute report lines from ledger lines. Their order and their quantities depend only on the content of the ledger."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import groupby
from operator import or_
from typing import Any

from django.db import connections
from django.db.models import Max, Min, Q
from django.db.models.functions import Collate

from ratelimits.billing.models import Adjustment, Report, ReportLine
from ratelimits.billing.reports.lost_replies import KeyAndMeter
from ratelimits.billing.reports.rows import ADJUSTMENT, CORRECTION, USAGE, line_id, report_id
from ratelimits.billing.reports.terms import RuleBook
from ratelimits.conf import conf
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.models.accounts.named import NamedCustomer
from ratelimits.salts import pseudonym_of_key
from ratelimits.usage.models import Line
from ratelimits.usage.models.sums import ExactSum
from ratelimits.usage.periods import SECOND, in_spans

#: Columns by which ledger lines are sorted and grouped. Each group of a customer becomes one report line.
GROUP = ("meter", "key", "rule", "version")
#: Columns with texts. PostgreSQL would sort them by the rules of a language.
_TEXTS = ("account", "text", "identifier", "customer_id", "meter", "key")
#: Columns that are summed up in each group.
SUMS = ("admitted_requests", "admitted_units", "denied_requests", "refunded_units")
#: Maximum number of rows that are read or written at once.
CHUNK = 2000

#: A group of ledger lines: its columns and sums, by name (see `grouped`). `of_period` adds "period", the start of the
#: billing period (s since 1970 UTC), and `Limits.of` adds "limit".
Group = dict[str, Any]


def in_order(using: str, *names: str) -> list[Any]:
    """Return arguments for `order_by()` that sort by these columns.

    With these arguments, every database sorts by code points.
    """
    if connections[using].vendor != "postgresql":
        return list(names)
    return [Collate(name, "C") if name in _TEXTS else name for name in names]


#: The condition for lines with usage. Other lines only record what a rule in shadow mode would have refused.
_USED = Q(admitted_requests__gt=0) | Q(admitted_units__gt=0) | Q(denied_requests__gt=0) | Q(refunded_units__gt=0)


def grouped(condition: Q, *sources: str, columns: Sequence[str] = GROUP) -> Iterator[Group]:
    """Yield the groups of the ledger lines that match a condition, sorted by `columns`.

    A group has the values of these columns and the sums of the columns SUMS. It also has the first and the last bin of
    its lines, and the first and the last shard and position of their batches. `sources` are the aliases of the
    databases that contain the lines.
    """
    if len(sources) == 1:
        return _grouped(sources[0], condition, columns)
    streams = heapq.merge(*(_grouped(using, condition, columns) for using in sources), key=_group_key)
    return (reduce(_joined, groups) for _key, groups in groupby(streams, key=_group_key))


def _group_key(group: Group) -> tuple[Any, ...]:
    return tuple(group[name] for name in GROUP)


def _joined(group: Group, other: Group) -> Group:
    """Join two parts of a group that come from two databases."""
    return {
        **group,
        **{name: group[name] + other[name] for name in SUMS},
        **{name: min(group[name], other[name]) for name in ("first_bin", "first_shard", "first_position")},
        **{name: max(group[name], other[name]) for name in ("last_bin", "last_shard", "last_position")},
    }


def _grouped(using: str, condition: Q, columns: Sequence[str]) -> Iterator[Group]:
    lines = Line.objects.using(using).filter(condition, _USED).values(*columns).order_by(*in_order(using, *columns))
    sums: Iterator[Group] = lines.annotate(
        **{name: ExactSum(name) for name in SUMS},
        first_bin=Min("bin"),
        last_bin=Max("bin"),
        first_shard=Min("batch__shard"),
        last_shard=Max("batch__shard"),
        first_position=Min("batch__first_position"),
        last_position=Max("batch__position"),
    ).iterator(chunk_size=CHUNK)
    return sums


def between(since: Mapping[str, int], chain: Mapping[str, int]) -> Q:
    """Return the condition for the lines of batches after the positions `since`, up to the positions `chain`.

    `since` and `chain` have a position for each shard.
    """
    shards = [
        Q(batch__shard=int(shard), batch__position__gt=since.get(shard, 0), batch__position__lte=position)
        for shard, position in sorted(chain.items())
    ]
    no_lines = Q(pk__in=())  # the result if `chain` is empty
    return reduce(or_, shards, no_lines)


@dataclass(slots=True)
class Allowance:
    """The units that a plan includes in a billing period, how many of them are used, and the overage, by meter."""

    #: The units that the plan includes.
    included: Mapping[str, int]
    #: The included units that are used.
    used: dict[str, int] = field(default_factory=dict)
    #: The overage: the units above the included units.
    over: dict[str, int] = field(default_factory=dict)
    #: The slug of the plan; None means the plan of the report.
    plan: str | None = None

    def split(self, meter: str, billable: int) -> tuple[int, int]:
        """Add units of a meter; return how many of them are included, and how many are overage.

        If `billable` is below 0, units are subtracted. They reduce the overage first.
        """
        used, over = self.used.get(meter, 0), self.over.get(meter, 0)
        if billable >= 0:
            included = min(billable, max(self.included.get(meter, 0) - used, 0))
        else:
            subtracted_from_overage = min(-billable, max(over, 0))
            included = billable + subtracted_from_overage
        self.used[meter] = used + included
        self.over[meter] = over + billable - included
        return included, billable - included


def unit_of(meter: str) -> str:
    """Return the unit of a meter: the one in the setting UNITS, otherwise the meter's name."""
    return conf.UNITS.get(meter) or meter


def allowance_with_reported_units(
    using: str, token: str, start: int, included: Mapping[str, int], before: int | None = None
) -> Allowance:
    """Return the allowance of a billing period, with the units that the period's reports have already used.

    `token` is the customer's token, and `start` the start of the period (µs since 1970 UTC). If `before` is not None,
    only reports with a smaller primary key are used.
    """
    lines = ReportLine.objects.using(using).filter(report__customer__token=token, usage_period=start // SECOND)
    if before is not None:
        lines = lines.filter(report__lt=before)
    sums = list(
        lines.values_list("meter").order_by().annotate(ExactSum("included_quantity"), ExactSum("overage_quantity"))
    )
    return Allowance(included, {name: used for name, used, _over in sums}, {name: over for name, _used, over in sums})


def of_customer(customer: NamedCustomer, start: int, end: int) -> Q:
    """Return the condition for the ledger lines of a customer's billing period from `start` to `end`."""
    return in_spans(customer.spans(start, end))


def of_period(groups: Iterable[Group], start: int) -> Iterator[Group]:
    """Add `period` to each group: all of them belong to the period that starts at `start` (µs since 1970 UTC)."""
    return ({**group, "period": start // SECOND} for group in groups)


def usage_lines(
    report: Report,
    groups: Iterable[Group],
    rules: RuleBook,
    allowances: Mapping[int, Allowance],
    lost: Counter[KeyAndMeter] | None = None,
) -> Iterator[ReportLine]:
    """Yield a line for each group, then a line for each key and meter that has lost replies but no group.

    `allowances` has the allowance of each billing period, by the period's start in µs. `lost` has the number of lost
    replies by key and meter. If several lines have the same key and meter, only the first of these lines gets the
    number. The entries whose numbers were used are removed from `lost`.
    """
    lost = Counter() if lost is None else lost
    for number, group in enumerate(groups, 1):
        line = usage_line(report, number, group, rules, allowances)
        line.unknown_count = lost.pop((group["key"], group["meter"]), 0)
        yield line
    for (key, meter), count in sorted(lost.items()):
        line = _plain_line(report, key=key, meter=meter)
        line.unknown_count = count
        yield _with_line_id(line, USAGE, "unknown", meter, _hidden(report, key))


def gap_line(report: Report) -> ReportLine:
    """Return the only line of a version that adds gaps and nothing else. All quantities of the line are 0."""
    return _with_line_id(_plain_line(report), USAGE, "gap")


def _with_line_id(line: ReportLine, *subject: str) -> ReportLine:
    """Set the `line_id` of a line and return the line. A line of the second or a later version becomes a correction."""
    report = line.report
    name = report_id(report.customer_id, report.period_start)
    line.line_id = line_id(name, *subject)
    if report.version > 1:
        line.corrects_line_id, line.charge_class = line.line_id, CORRECTION
        line.line_id = line_id(name, report.version, CORRECTION, *subject)
    return line


def _plain_line(report: Report, own_id: str = "", key: str = "", meter: str = "") -> ReportLine:
    """Return a usage line for the whole period, with 0 in all quantities.

    The number of the line is set when the line is written.
    """
    return ReportLine(
        report=report,
        number=0,
        line_id=own_id,
        key=key,
        meter=meter,
        unit=unit_of(meter),
        charge_category=USAGE,
        charge_period_start=report.period_start,
        charge_period_end=report.period_end,
        consumed_quantity=0,
        included_quantity=0,
        overage_quantity=0,
        refunded_quantity=0,
        admitted_count=0,
        denied_count=0,
        plan=report.plan,
        usage_period=report.period_start // SECOND,
    )


def unused_line(report: Report) -> ReportLine:
    """Return the line of a customer without usage: all quantities are 0, and key, meter and rule are empty."""
    line = _plain_line(report, line_id(report_id(report.customer_id, report.period_start), USAGE, "unused"))
    line.number = 1
    return line


def adjustment_line(report: Report, adjustment: Adjustment, allowance: Allowance) -> ReportLine:
    """Return the line of an adjustment, and add the adjustment's units to the allowance."""
    own_id = line_id(report_id(report.customer_id, report.period_start), ADJUSTMENT, str(adjustment.reference))
    line = _plain_line(report, own_id, adjustment.key, adjustment.meter)
    line.charge_category = ADJUSTMENT
    line.charge_class = CORRECTION if report.version > 1 else ""
    line.corrects_line_id = adjustment.corrects_line_id
    line.consumed_quantity = adjustment.quantity
    line.included_quantity, line.overage_quantity = allowance.split(adjustment.meter, adjustment.quantity)
    return line


def usage_line(
    report: Report,
    number: int,
    group: Group,
    rules: RuleBook,
    allowances: Mapping[int, Allowance],
    make_id: Callable[..., str] = line_id,
) -> ReportLine:
    """Return the line of a group. The line is a correction if the group's billing period had a report before.

    `allowances` has the allowance of each billing period, by the period's start in µs. `make_id` makes the `line_id`.
    (An earlier version of this app made `line_id` in another way. Verification tries both functions.)
    """
    rule = rules.of(group["rule"], group["version"])
    billable = group["admitted_units"] - group["refunded_units"]
    start = group["period"] * SECOND
    included, overage = allowances[start].split(group["meter"], billable)
    subject = (group["meter"], _hidden(report, group["key"]), group["rule"], group["version"])
    is_correction = report.version > 1 or start != report.period_start
    name = report_id(report.customer_id, report.period_start)
    if is_correction:
        own_id = make_id(name, report.version, CORRECTION, start, *subject)
        corrected = make_id(report_id(report.customer_id, start), USAGE, *subject)
    else:
        own_id, corrected = make_id(name, USAGE, *subject), ""
    return ReportLine(
        report=report,
        number=number,
        line_id=own_id,
        key=group["key"],
        meter=group["meter"],
        unit=unit_of(group["meter"]),
        charge_category=USAGE,
        charge_class=CORRECTION if is_correction else "",
        corrects_line_id=corrected,
        charge_period_start=group["first_bin"] * SECOND,
        charge_period_end=(group["last_bin"] + BIN_SECONDS) * SECOND,
        consumed_quantity=group["admitted_units"],
        included_quantity=included,
        overage_quantity=overage,
        refunded_quantity=group["refunded_units"],
        admitted_count=group["admitted_requests"],
        denied_count=group["denied_requests"],
        limit=group["limit"],
        rule=rule.name,
        rule_version=group["version"],
        plan=report.plan if (plan := allowances[start].plan) is None else plan,
        batch_range=batch_range(group),
        usage_period=group["period"],
        rule_id=group["rule"],
    )


def _hidden(report: Report, key: str) -> str:
    """Return a key as it is in the ids of a customer's lines: its pseudonym. Nobody can find the key from the id.

    Once the customer is erased, it has no salt, and its keys are pseudonyms already.
    """
    salt = report.customer.salt
    return pseudonym_of_key(key, salt) if salt else key


def batch_range(group: Group) -> str:
    """Return the shard and the positions of a group's batches, such as "07:12-45".

    If the batches are of several shards, return only the first and the last shard, such as "07…09".
    """
    shard = f"{group['first_shard']:02d}"
    if group["last_shard"] != group["first_shard"]:
        return f"{shard}…{group['last_shard']:02d}"
    first, last = group["first_position"], group["last_position"]
    return f"{shard}:{first}" if first == last else f"{shard}:{first}-{last}"
