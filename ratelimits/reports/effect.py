"""What an adjustment makes of its period's report, before it is on one."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Q, Sum

from ratelimits.conf import conf
from ratelimits.engine.calendar import zone
from ratelimits.models import Adjustment, Report, ReportLine
from ratelimits.reports.adjusting import start_of, unreported
from ratelimits.reports.build import Allowance
from ratelimits.reports.periods import moment
from ratelimits.reports.rows import USAGE
from ratelimits.reports.statements import statements
from ratelimits.reports.terms import TermsBook


@dataclass(frozen=True, slots=True)
class Quantities:
    """Units of one meter that a report bills: all of them, and how many are included and overage."""

    included: int
    overage: int

    @property
    def billed(self) -> int:
        return self.included + self.overage


@dataclass(frozen=True, slots=True)
class Effect:
    """What the period's report says of the adjustment's meter before and after it.

    used      units that were used and not refunded, whatever was adjusted
    version   of the report that is corrected; 0 while the period is open, when all of this is provisional
    quantity  that is added, or below zero taken off
    """

    used: int
    version: int
    quantity: int
    before: Quantities
    after: Quantities

    @property
    def is_large(self) -> bool:
        """Whether it is more than all that was used."""
        return abs(self.quantity) > self.used

    @property
    def percent(self) -> int | None:
        """How much it is of what was used, rounded up; None where nothing was."""
        return -(-abs(self.quantity) * 100 // self.used) if self.used > 0 else None


def effect_of(adjustment: Adjustment, using: str | None = None) -> Effect:
    """Return what an adjustment that no report has makes of its period, behind those that count already."""
    using = using or conf.DATABASE
    start, meter = start_of(adjustment), adjustment.meter
    versions = Report.objects.using(using).filter(account=adjustment.account, period_start=start)
    newest = versions.order_by("-version").first()
    if newest is None:
        used, allowance = _provisional(using, adjustment, start)
    else:
        used, allowance = _final(using, newest, meter)
    others = unreported(using, account=adjustment.account, period_start=adjustment.period_start, meter=meter)
    for other in others.exclude(pk=adjustment.pk):
        allowance.split(meter, other.quantity)
    before = _held(allowance, meter)
    allowance.split(meter, adjustment.quantity)
    version = 0 if newest is None else newest.version
    return Effect(used, version, adjustment.quantity, before, _held(allowance, meter))


def _held(allowance: Allowance, meter: str) -> Quantities:
    return Quantities(allowance.used.get(meter, 0), allowance.over.get(meter, 0))


def _final(using: str, report: Report, meter: str) -> tuple[int, Allowance]:
    about = {"report__account": report.account, "report__period_start": report.period_start, "meter": meter}
    usage = Q(charge_category=USAGE)
    sums = (
        ReportLine.objects.using(using)
        .filter(**about)
        .aggregate(
            consumed=Sum("consumed_quantity", filter=usage),
            refunded=Sum("refunded_quantity", filter=usage),
            included=Sum("included_quantity"),
            overage=Sum("overage_quantity"),
        )
    )
    held = {name: value or 0 for name, value in sums.items()}
    allowance = Allowance(report.included, {meter: held["included"]}, {meter: held["overage"]})
    return held["consumed"] - held["refunded"], allowance


def _provisional(using: str, adjustment: Adjustment, start: int) -> tuple[int, Allowance]:
    terms = TermsBook(using).of([adjustment.account])[adjustment.account]
    month = f"{moment(start).astimezone(zone(terms.timezone)):%Y-%m}"
    used, meter = 0, adjustment.meter
    for found in statements(month, account=adjustment.account, using=using):
        if found.report.period_start == start:
            allowance = Allowance(found.report.included, {meter: 0}, {meter: 0})
            for row in found.rows:
                if row.meter == meter and row.charge_category == USAGE:
                    allowance.used[meter] += row.included_quantity
                    allowance.over[meter] += row.overage_quantity
                    used += row.consumed_quantity - row.refunded_quantity
            return used, allowance
    return used, Allowance(terms.included)
