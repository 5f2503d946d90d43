"""Read the billing terms that customers have now, and their usage in their present billing period."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ratelimits.algorithms.billing_periods import Period, Timeline
from ratelimits.models import Account
from ratelimits.models.accounts.named import NamedCustomer, named_now
from ratelimits.models.periods import timelines_of
from ratelimits.usage.ledger.bills import bills
from ratelimits.usage.models import PeriodUsage
from ratelimits.usage.models.sums import ExactSum

_NOTHING: Mapping[str, int] = {}
_SECOND = 1_000_000


@dataclass(frozen=True, slots=True)
class Terms:
    """The billing terms of a customer."""

    timezone: str = "UTC"
    #: The day and hour at which billing months start; "" means calendar months.
    anchor: str = ""
    #: The slug of the plan.
    plan: str = ""
    #: The quantities that the plan includes, by meter. Without the floor of bills, it is empty.
    included: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    #: All billing periods of the customer.
    timeline: Timeline = field(default_factory=Timeline, compare=False)

    def period(self, at: int) -> Period:
        """Return the billing period that contains a moment (µs since 1970 UTC)."""
        return self.timeline.at(at)


class TermsBook:
    """The current terms of customers. What plans include is cached."""

    def __init__(self, using: str) -> None:
        self._using = using
        self._included = None if bills.included is None else bills.included(using)

    def of(self, texts: Iterable[str]) -> dict[str, Terms]:
        """Return the terms of the customers whom these account texts name now."""
        customers = named_now(self._using, set(texts))
        terms = self.of_customers(customers.values())
        return {text: terms[customer.token] for text, customer in customers.items()}

    def of_customers(self, customers: Iterable[NamedCustomer]) -> dict[str, Terms]:
        """Return the terms of these customers, by token. A customer without an account row has the default terms."""
        by_token = {customer.token: customer for customer in customers}
        token_of = {text: token for token, customer in by_token.items() for text in customer.present}
        rows = Account.objects.using(self._using).filter(identifier__in=token_of).order_by("-pk")
        # If raw SQL wrote several rows of a customer, the oldest holds.
        row_of: dict[str, list[Any]] = {}
        for text, *columns in rows.values_list("identifier", "timezone", "billing_anchor", "plan", "plan__slug"):
            row_of[token_of[text]] = columns
        timelines = timelines_of(self._using, by_token.values())
        terms = {token: Terms(timeline=timelines[token]) for token in by_token}
        for token, (timezone, anchor, plan, slug) in row_of.items():
            included = _NOTHING if plan is None or self._included is None else self._included(plan)
            terms[token] = Terms(timezone, anchor, slug or "", included, timelines[token])
        return terms


@dataclass(frozen=True, slots=True)
class MeterUse:
    """How many units of one meter were used (without refunded units), and how many the plan includes.

    `included` is None if nobody knows it, because the floor of bills is not installed.
    """

    meter: str
    used: int
    included: int | None

    @property
    def remaining(self) -> int | None:
        """Return the included units that are not used yet."""
        return None if self.included is None else max(self.included - self.used, 0)

    @property
    def overage(self) -> int | None:
        """Return the used units above the included units."""
        return None if self.included is None else max(self.used - self.included, 0)


def present_usage(using: str, customer: NamedCustomer, terms: Terms, now: int) -> tuple[Period, list[MeterUse]]:
    """Return the customer's billing period at `now` (µs since 1970 UTC), and its usage of each meter.

    The numbers come from the totals of the ledger's lines. Perhaps the newest usage is not in these totals yet.
    """
    period = terms.period(now)
    rows = PeriodUsage.objects.using(using).filter(customer=customer.pk, period=period.start // _SECOND)
    sums = rows.values_list("meter").order_by().annotate(ExactSum("admitted_units"), ExactSum("refunded_units"))
    used = {meter: admitted - refunded for meter, admitted, refunded in sums}
    if bills.included is None:
        return period, [MeterUse(meter, used[meter], None) for meter in sorted(used)]
    meters = sorted(used.keys() | terms.included.keys())
    return period, [MeterUse(meter, used.get(meter, 0), terms.included.get(meter, 0)) for meter in meters]
