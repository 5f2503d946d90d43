"""What an adjustment makes of its period's report, before it is on one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from decimal import Decimal

from django.db.models import Sum

from ratelimits.conf import conf
from ratelimits.models import Adjustment, ReportLine
from ratelimits.pricing.money import ZERO
from ratelimits.reports.adjusting import start_of
from ratelimits.reports.amounts import billed, price_of, priced_together
from ratelimits.reports.build import Allowance
from ratelimits.reports.closing.account import Closing
from ratelimits.reports.closing.account_periods import AccountPeriods
from ratelimits.reports.closing.books import Books
from ratelimits.reports.periods import SECOND, month_of
from ratelimits.reports.rows import USAGE
from ratelimits.reports.statements import statements
from ratelimits.reports.terms.price_book import Record
from ratelimits.reports.tiles import Tile


@dataclass(frozen=True, slots=True)
class Quantities:
    """Units of one meter that a report bills: all of them, and how many are included and overage."""

    included: int
    overage: int

    @property
    def billed(self) -> int:
        return self.included + self.overage


@dataclass(frozen=True, slots=True)
class Owed:
    """What the account owes for the billing period, by all its meters, before and after an adjustment."""

    currency: str
    before: Decimal
    after: Decimal


@dataclass(frozen=True, slots=True)
class Effect:
    """What the period's report says of the adjustment's meter before and after it.

    used      units that were used and not refunded, whatever was adjusted
    version   of the report that is corrected; 0 while the period is open, when all of this is provisional
    quantity  that is added, or below zero taken off
    owed      None where the plan has no prices
    """

    used: int
    version: int
    quantity: int
    before: Quantities
    after: Quantities
    owed: Owed | None = None

    @property
    def is_large(self) -> bool:
        """Whether it is more than all that was used."""
        return abs(self.quantity) > self.used

    @property
    def percent(self) -> int | None:
        """How much it is of what was used, rounded up; None where nothing was."""
        return -(-abs(self.quantity) * 100 // self.used) if self.used > 0 else None


@dataclass(frozen=True, slots=True)
class _Standing:
    """A billing period without what waits for its next report.

    record  its prices
    beside  units that are priced together with the account's own, by meter: its other names have them
    exists  whether it has a report, or usage for one
    """

    used: int
    version: int
    allowance: Allowance
    record: Record
    beside: Counter[str]
    exists: bool

    def price(self) -> Decimal:
        """Return what the period costs as its allowance is used now."""
        over, meters = self.allowance.over, self.record["meters"]
        return price_of(self.record, {meter: over.get(meter, 0) + self.beside[meter] for meter in meters})


def effect_of(adjustment: Adjustment, using: str | None = None) -> Effect:
    """Return what an adjustment that no report has makes of its period, after those that count already."""
    using = using or conf.DATABASE
    account, meter = adjustment.account, adjustment.meter
    books = Books(using, [account], {})
    closing = Closing(books, account, [], 0)
    tile = closing.periods.around(start_of(adjustment))
    if tile is not None and tile.closed:
        standing = _final(using, books, tile, closing.left(tile), adjustment)
    else:
        standing = _provisional(using, books, closing.periods, tile, adjustment)
    allowance, record = standing.allowance, standing.record
    others = [] if tile is None else closing.periods.adjustments(tile)
    waiting = [other for other in others if other.pk != adjustment.pk]
    for other in waiting:
        allowance.split(other.meter, other.quantity)
    before, owed = _held(allowance, meter), ZERO
    if record and (standing.exists or waiting):
        owed = standing.price()
    allowance.split(meter, adjustment.quantity)
    after = _held(allowance, meter)
    money = Owed(record["currency"], owed, standing.price()) if record else None
    return Effect(standing.used, standing.version, adjustment.quantity, before, after, money)


def _held(allowance: Allowance, meter: str) -> Quantities:
    return Quantities(allowance.used.get(meter, 0), allowance.over.get(meter, 0))


def _final(using: str, books: Books, tile: Tile, left: Allowance, adjustment: Adjustment) -> _Standing:
    reports = books.reports(adjustment.account)
    newest = max((each for each in reports if each.period_start == tile.start), key=lambda each: each.version)
    lines = ReportLine.objects.using(using).filter(report__account=adjustment.account, charge_category=USAGE)
    periods = sorted(start // SECOND for start in tile.members)
    sums = lines.filter(usage_period__in=periods, meter=adjustment.meter).aggregate(
        consumed=Sum("consumed_quantity"), refunded=Sum("refunded_quantity")
    )
    used = (sums["consumed"] or 0) - (sums["refunded"] or 0)
    names = newest.prices.get("names", ())
    record, beside = billed(priced_together(using, reports, adjustment.account, names), tile.start)
    beside.subtract(left.over)
    return _Standing(used, newest.version, left, record, beside, exists=True)


def _provisional(
    using: str, books: Books, periods: AccountPeriods, tile: Tile | None, adjustment: Adjustment
) -> _Standing:
    account, meter = adjustment.account, adjustment.meter
    period = books.terms(account, None).period(start_of(adjustment)) if tile is None else periods.period(tile)
    included = books.included(account, period.start, period.end)
    allowance, used, found = Allowance(included.included), 0, False
    for statement in statements(month_of(period.start, period.timezone), account=account, using=using):
        rows = statement.rows if statement.report.period_start == period.start else ()
        for row in (row for row in rows if row.charge_category == USAGE):
            found = True
            allowance.used[row.meter] = allowance.used.get(row.meter, 0) + row.included_quantity
            allowance.over[row.meter] = allowance.over.get(row.meter, 0) + row.overage_quantity
            used += row.consumed_quantity - row.refunded_quantity if row.meter == meter else 0
    record, beside = billed(priced_together(using, (), account, sorted(included.names)), period.start)
    try:
        record = record or books.prices.of(*included.priced)
    except ValueError:
        record = {}  # the list of open periods says what is wrong with the price
    return _Standing(used, 0, allowance, record, beside, exists=found or bool(beside))
