"""Read a customer's usage in its current billing period, with the quantities that its plan includes."""

from __future__ import annotations

from dataclasses import dataclass

from ratelimits.algorithms.billing_periods import Period
from ratelimits.models import PeriodUsage
from ratelimits.models.accounts.named import NamedCustomer
from ratelimits.models.ledger.sums import ExactSum
from ratelimits.reports.periods import SECOND
from ratelimits.reports.terms import Terms


@dataclass(frozen=True, slots=True)
class MeterUse:
    """How many units of one meter were used (without refunded units), and how many the plan includes."""

    meter: str
    used: int
    included: int

    @property
    def remaining(self) -> int:
        """Return the included units that are not used yet."""
        return max(self.included - self.used, 0)

    @property
    def overage(self) -> int:
        """Return the used units above the included units."""
        return max(self.used - self.included, 0)


def present_usage(using: str, customer: NamedCustomer, terms: Terms, now: int) -> tuple[Period, list[MeterUse]]:
    """Return the customer's billing period at `now` (µs since 1970 UTC), and its usage of each meter.

    The numbers come from the totals of the ledger's lines. Perhaps the newest usage is not in these totals yet.
    """
    period = terms.period(now)
    rows = PeriodUsage.objects.using(using).filter(customer=customer.pk, period=period.start // SECOND)
    sums = rows.values_list("meter").order_by().annotate(ExactSum("admitted_units"), ExactSum("refunded_units"))
    used = {meter: admitted - refunded for meter, admitted, refunded in sums}
    meters = sorted(used.keys() | terms.included.keys())
    return period, [MeterUse(meter, used.get(meter, 0), terms.included.get(meter, 0)) for meter in meters]
