"""Add up report lines by meter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from ratelimits.billing.models import ReportLine
from ratelimits.billing.reports.rows import CORRECTION
from ratelimits.usage.models.sums import ExactSum

_SUMS = ("consumed_quantity", "refunded_quantity", "included_quantity", "overage_quantity")


@dataclass(frozen=True, slots=True)
class MeterTotal:
    """Units of one meter on reports. Adjustments are part of `consumed`.

    corrects  whether these are the units of lines that correct closed periods
    """

    meter: str
    consumed: int = 0
    refunded: int = 0
    included: int = 0
    overage: int = 0
    corrects: bool = False

    @property
    def billed(self) -> int:
        """Return all units on the bill: the included units and the overage."""
        return self.included + self.overage


def meter_totals(using: str, reports: Iterable[int]) -> dict[int, list[MeterTotal]]:
    """Return, by the primary key of each version, the totals of the lines that this version added.

    `reports` are the primary keys of the versions. All totals are read with one query.

    Lines that correct closed periods have separate totals. A version has no entry if none of its lines has a meter.
    """
    lines = ReportLine.objects.using(using).filter(report__in=list(reports)).exclude(meter="").order_by()
    sums = lines.values_list("report", "meter", "charge_class").annotate(*(ExactSum(name) for name in _SUMS))
    by_report: dict[int, list[MeterTotal]] = defaultdict(list)
    for report, meter, charge_class, consumed, refunded, included, overage in sums:
        corrects = charge_class == CORRECTION
        by_report[report].append(MeterTotal(meter, consumed, refunded, included, overage, corrects))
    return {
        report: sorted(totals, key=lambda total: (total.corrects, total.meter)) for report, totals in by_report.items()
    }


def added_up(versions: Iterable[Iterable[MeterTotal]]) -> list[MeterTotal]:
    """Return the totals of several versions together: one MeterTotal for each meter, sorted by meter."""
    sums: dict[str, MeterTotal] = {}
    for total in chain.from_iterable(versions):
        before = sums.get(total.meter, MeterTotal(total.meter))
        sums[total.meter] = MeterTotal(
            total.meter,
            before.consumed + total.consumed,
            before.refunded + total.refunded,
            before.included + total.included,
            before.overage + total.overage,
        )
    return [sums[meter] for meter in sorted(sums)]
