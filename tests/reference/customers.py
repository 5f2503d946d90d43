"""Customers, their names, their billing periods and their bills, worked out from what happened and from nothing else.

Nothing here comes from the app: months are those of periods.py, and money is counted in fractions. Moments are in µs
since 1970 UTC.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from fractions import Fraction
from functools import lru_cache
from zoneinfo import ZoneInfo

from tests.reference.amounts import SECOND
from tests.reference.periods import DAY, Calendar

Span = tuple[int, int]
#: The largest number that the total of a meter in a billing period can have.
LARGEST = 2**63 - 1


@lru_cache
def months(zone: str, anchor: str) -> Calendar:
    return Calendar("month", zone, anchor or None)


@dataclass
class Periods:
    """The billing periods of a customer: the present terms, and the frozen periods with their zones and months.

    `zones` says of which zone the data are that a zone has now: other versions of the time zone data say other things.
    """

    zone: str = "UTC"
    anchor: str = ""
    frozen: dict[Span, tuple[str, str]] = field(default_factory=dict)
    zones: Mapping[str, str] = field(default_factory=dict)

    def period(self, at: int) -> Span:
        """Return the period around a moment: go from month to month until a cut, in both directions."""
        for span in self.frozen:
            if span[0] <= at < span[1]:
                return span
        low = max((end for _start, end in self.frozen if end <= at), default=None)
        high = min((start for start, _end in self.frozen if start > at), default=None)
        calendar = months(self.zones.get(self.zone, self.zone), self.anchor)
        start, end = calendar.span(at)
        while not self.is_cut(start, low, high):
            start = calendar.span(start - 1)[0]
            if low is not None and start < low:
                start = low
        while not self.is_cut(end, low, high):
            end = calendar.span(end)[1]
            if high is not None and end > high:
                end = high
        return start if low is None else max(start, low), end if high is None else min(end, high)

    @staticmethod
    def is_cut(month: int, low: int | None, high: int | None) -> bool:
        if month in (low, high):
            return True
        return (low is None or month >= low + 2 * DAY) and (high is None or month <= high - 2 * DAY)

    def freeze(self, at: int) -> Span:
        span = self.period(at)
        if span not in self.frozen:
            zone = ZoneInfo(self.zones.get(self.zone, self.zone))
            self.frozen[span] = self.zone, f"{datetime.fromtimestamp((span[1] - 1) // SECOND, zone):%Y-%m}"
        return span

    def edit(self, zone: str, anchor: str, now: int) -> None:
        """Give the customer other terms. First freeze all periods from the first frozen one to the present one."""
        if (zone, anchor) != (self.zone, self.anchor) and self.frozen:
            moment = min(self.frozen)[0]
            while moment <= now:
                moment = self.freeze(moment)[1]
        self.zone, self.anchor = zone, anchor


@dataclass(frozen=True)
class Tier:
    """The units up to `up_to` (None: all others). The fee is due if one unit is in the tier."""

    up_to: int | None
    price: Fraction
    fee: Fraction = Fraction(0)


@dataclass(frozen=True)
class Price:
    """What a meter costs in a period. `with_report`: fees are due without net usage too."""

    pricing: str
    tiers: tuple[Tier, ...]
    flat_fee: Fraction = Fraction(0)
    minimum: Fraction = Fraction(0)
    with_report: bool = False

    def of(self, net: int, overage: int) -> Fraction:
        if net <= 0 and not self.with_report:
            return Fraction(0)
        units = [*self._units(max(overage, 0) if net > 0 else 0)]
        cost = sum((count * tier.price + tier.fee for count, tier in units), self.flat_fee)
        return max(cost, self.minimum)

    def _units(self, total: int) -> Iterator[tuple[int, Tier]]:
        """Yield the tiers that have units, each with their number."""
        ends = [total if tier.up_to is None else tier.up_to for tier in self.tiers]
        if self.pricing == "volume":
            if total:
                yield total, next(tier for end, tier in zip(ends, self.tiers, strict=True) if total <= end)
            return
        for number, tier in enumerate(self.tiers):
            count = min(total, ends[number]) - min(total, ends[number - 1] if number else 0)
            if count > 0:
                yield count, tier


@dataclass(frozen=True)
class Offer:
    """What a plan includes and charges, by meter; `digits` are the decimals of its currency."""

    included: Mapping[str, int] = field(default_factory=dict)
    prices: Mapping[str, Price] = field(default_factory=dict)
    digits: int = 2


@dataclass
class Customer:
    """A customer: its billing periods, and its plans ("" for none), each from a moment on."""

    periods: Periods
    plans: list[tuple[int, str]] = field(default_factory=lambda: [(0, "")])

    def plan_of(self, span: Span) -> tuple[str, int]:
        """Return the plan at the end of a period, or else the last one in it, and the moment of its terms."""
        ends = [*(since for since, _plan in self.plans[1:]), span[1]]
        for (since, plan), until in zip(reversed(self.plans), reversed(ends), strict=True):
            until = min(until, span[1])
            if plan and since < until and until > span[0]:
                return plan, until - 1
        return "", 0


@dataclass
class Use:
    """Units that a request took under a text. `arrived` is when its customer's totals got it; None if not yet."""

    text: str
    at: int
    meter: str
    units: int
    refunded: int = 0
    arrived: int | None = None
    #: Whether a report has it: "yes", "no", or "perhaps", where LATE_USAGE lets it wait for a later report.
    reported: str = "no"

    @property
    def bin(self) -> int:
        return self.at // (900 * SECOND) * (900 * SECOND)


@dataclass(frozen=True)
class Adjustment:
    """Units that a person added to a period."""

    customer: int
    span: Span
    meter: str
    units: int
    arrived: int


@dataclass
class Bill:
    """What a customer owes for a period: by meter the units; `amount` is None without prices."""

    consumed: dict[str, int] = field(default_factory=dict)
    refunded: dict[str, int] = field(default_factory=dict)
    included: dict[str, int] = field(default_factory=dict)
    overage: dict[str, int] = field(default_factory=dict)
    amount: Fraction | None = None
    #: Whether a total has reached LARGEST: then the period is never closed, and late usage no longer reported.
    is_full: bool = False
    #: When the first of its usage and adjustments arrived.
    arrived: int = 2**62


class Books:
    """All customers, and everything that happened. Customers are numbered as they appear."""

    def __init__(self, late_usage: str) -> None:
        self.late_usage = late_usage
        self.zones: dict[str, str] = {}
        self.customers: list[Customer] = []
        #: By text: from when on it names which customer.
        self.names: dict[str, list[tuple[int, int]]] = {}
        #: By plan: from when on it makes which offer.
        self.offers: dict[str, list[tuple[int, Offer]]] = {}
        self.uses: dict[str, list[Use]] = {}
        self.adjustments: list[Adjustment] = []
        #: The texts with requests of very many units.
        self.large: set[str] = set()
        self._untallied: list[Use] = []
        self._unreported: list[Use] = []
        self._closed: set[tuple[int, Span]] = set()

    def new(self) -> int:
        self.customers.append(Customer(Periods(zones=self.zones)))
        return len(self.customers) - 1

    def customer(self, text: str, at: int) -> int:
        """Return the customer whom a text names at a moment; the first time, make one."""
        names = self.names.setdefault(text, [])
        if not names:
            names.append((0, self.new()))
        return names[bisect_right(names, at, key=lambda name: name[0]) - 1][1]

    def now(self, text: str) -> int:
        """Return the newest customer of a text."""
        return self.customer(text, 2**62)

    def texts(self, customer: int) -> list[str]:
        """Return the texts that name a customer now."""
        return [text for text, names in self.names.items() if names[-1][1] == customer]

    def freeze(self, text: str, at: int) -> Span:
        return self.customers[self.customer(text, at)].periods.freeze(at)

    def use(self, use: Use) -> None:
        self.uses.setdefault(use.text, []).append(use)
        if use.units > LARGEST // 4:
            self.large.add(use.text)
        self._untallied.append(use)

    def tally(self, now: int) -> None:
        for use in self._untallied:
            use.arrived = now
            self.freeze(use.text, use.bin)
        self._unreported += self._untallied
        self._untallied = []

    def span_of(self, use: Use) -> tuple[int, Span]:
        """Return the customer and the period to which a use belongs."""
        customer = self.customer(use.text, use.bin)
        return customer, self.customers[customer].periods.period(use.bin)

    def adjust(self, customer: int, at: int, meter: str, units: int, now: int) -> None:
        span = self.customers[customer].periods.freeze(at)
        self.adjustments.append(Adjustment(customer, span, meter, units, now))

    def move(self, text: str, to: int | None, since: int, now: int) -> int:
        """Give a text to a customer (None: a new one), and return the customer."""
        self.customer(text, 0)
        to = self.new() if to is None else to
        before = {id(use): self.customer(text, use.bin) for use in self.uses.get(text, ())}
        names = [name for name in self.names[text] if name[0] < since]
        self.names[text] = names if names and names[-1][1] == to else [*names, (since, to)]
        for use in self.uses.get(text, ()):
            if use.arrived is not None and use.bin >= since:
                self.freeze(text, use.bin)
                use.arrived = use.arrived if self.customer(text, use.bin) == before[id(use)] else now
        return to

    def close(self, now: int, grace: int) -> None:
        """Write the reports of all periods that are over. Only which usage is on a report matters here."""
        closed = {(one.customer, one.span) for one in self.adjustments if one.span[1] + grace <= now}
        full = {subject[:2] for subject, units in self.totals().items() if units >= LARGEST}
        for use in self._unreported:
            subject = self.span_of(use)
            if subject[1][1] + grace <= now:
                is_late = subject in full or (subject in self._closed and self.late_usage == "period")
                use.reported = "perhaps" if is_late else "yes"
                closed.add(subject)
        self._closed |= closed
        self._unreported = [use for use in self._unreported if use.reported != "yes"]

    def reported_until(self, text: str, to: int | None) -> tuple[int, int]:
        """Return the least and the greatest end that the newest period with reported usage of a text can have.

        Any period with a report of the customer who is to get the text counts too.
        """
        ends: dict[str, int] = {"yes": 0, "perhaps": 0, "no": 0}
        for use in self.uses.get(text, ()):
            ends[use.reported] = max(ends[use.reported], self.span_of(use)[1][1])
        full = {subject[:2] for subject, units in self.totals().items() if units >= LARGEST}
        for customer, span in self._closed:
            if customer == to:
                known = "perhaps" if (customer, span) in full else "yes"
                ends[known] = max(ends[known], span[1])
        return ends["yes"], max(ends["yes"], ends["perhaps"])

    def totals(self) -> dict[tuple[int, Span, str, str], int]:
        """Return the units of each customer, period, text and meter, for the texts that have used very many."""
        totals: dict[tuple[int, Span, str, str], int] = {}
        for text in self.large:
            for use in self.uses.get(text, ()):
                key = (*self.span_of(use), text, use.meter)
                totals[key] = totals.get(key, 0) + use.units
        return totals

    def bills(self) -> dict[tuple[int, Span], Bill]:
        """Return the bill of each customer and period with usage or adjustments."""
        bills: dict[tuple[int, Span], Bill] = {}

        def add(customer: int, span: Span, meter: str, units: int, refunded: int, arrived: int) -> None:
            bill = bills.setdefault((customer, span), Bill())
            bill.arrived = min(arrived, bill.arrived)
            bill.consumed[meter] = bill.consumed.get(meter, 0) + units
            bill.refunded[meter] = bill.refunded.get(meter, 0) + refunded

        for uses in self.uses.values():
            for use in uses:
                assert use.arrived is not None
                add(*self.span_of(use), use.meter, use.units, use.refunded, use.arrived)
        for one in self.adjustments:
            add(one.customer, one.span, one.meter, one.units, 0, one.arrived)
        for (customer, span, _text, _meter), units in self.totals().items():
            bills[customer, span].is_full |= units >= LARGEST
        for (customer, span), bill in bills.items():
            self._price(self.customers[customer], span, bill)
        return bills

    def _price(self, customer: Customer, span: Span, bill: Bill) -> None:
        plan, moment = customer.plan_of(span)
        offer = Offer()
        if plan:
            offer = next(one for since, one in reversed(self.offers[plan]) if since <= moment)
        net = {meter: units - bill.refunded[meter] for meter, units in bill.consumed.items()}
        for meter, units in net.items():
            bill.included[meter] = min(units, offer.included.get(meter, 0))
            bill.overage[meter] = units - bill.included[meter]
        if offer.prices:
            exact = sum(
                (price.of(net.get(meter, 0), bill.overage.get(meter, 0)) for meter, price in offer.prices.items()),
                Fraction(0),
            )
            unit = 10**offer.digits
            bill.amount = Fraction(round(exact * unit), unit)
