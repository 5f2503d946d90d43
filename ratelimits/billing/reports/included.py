"""Find the quantities that a customer's plan includes in a billing period.

The customer can have several plans in one period. Without proration, its plan at the end of the period gives the
quantities. If the customer has no plan at the end, the last plan that it had in the period gives the quantities.

With proration (RATELIMITS["PRORATION"] is "time"), each plan gives a share of its quantities: the share of the month in
which the customer was on this plan.

In both cases the prices are those of the plan at the end of the period. If the customer has no plan at the end, they
are the prices of the last plan.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ratelimits.algorithms.billing_periods import Timeline
from ratelimits.billing.reports.terms import AccountTerms
from ratelimits.billing.reports.terms.account_book import StateSpan
from ratelimits.conf import conf
from ratelimits.models.accounts.named import NamedCustomer
from ratelimits.usage.ledger.terms import Terms


@dataclass(frozen=True, slots=True)
class Included:
    """The quantities that a customer's plan or plans include in a billing period.

    plan          the slug of the plan at the end of the period, or else of the last plan in the period
    included      the included quantities, by meter
    price_source  the slug of the plan whose prices apply, and the moment (µs since 1970 UTC) at which the plan had
                  these prices
    """

    plan: str
    included: Mapping[str, int]
    price_source: tuple[str, int] = ("", 0)


class IncludedBook:
    """Finds the included quantities of billing periods. The terms of the customers are read only once."""

    def __init__(self, terms: AccountTerms) -> None:
        self._terms = terms

    def of(self, customer: NamedCustomer, start: int, end: int, proration: str | None = None) -> Included:
        """Return the included quantities of a customer's billing period from `start` to `end` (µs since 1970 UTC).

        If `proration` is given, it replaces the setting PRORATION.
        """
        terms = self._terms.at(customer, end - 1)
        prorated = (proration or conf.PRORATION) == "time"
        # Without proration, earlier plans matter only if there is no plan at the end.
        spans = [] if terms.plan and not prorated else self._terms.accounts.spans(customer, start, end)
        unprorated = self._without_proration(terms, spans, end)
        return self._with_proration(terms, spans, start, end, unprorated) if prorated else unprorated

    def _without_proration(self, terms: Terms, spans: Sequence[StateSpan], end: int) -> Included:
        """Return the quantities of the plan at the end of the period, or else of the last plan in the period."""
        if not terms.plan:
            for span in reversed(spans):
                if span.state.plan is not None:
                    plan, included = self._terms.plans.of(span.state.plan, span.end - 1)
                    return Included(plan, included, price_source=(plan, span.end - 1))
        return Included(terms.plan, terms.included, price_source=(terms.plan, end - 1))

    def _with_proration(
        self, terms: Terms, spans: Iterable[StateSpan], start: int, end: int, unprorated: Included
    ) -> Included:
        """Return the sum of all plans' shares for each meter, rounded half up.

        `unprorated` is the result without proration. The result with proration has the same prices.
        """
        all_terms = [(terms.timezone, terms.anchor), *((span.state.timezone, span.state.anchor) for span in spans)]
        month = _month_length(all_terms, start, end)
        sums: dict[str, Fraction] = defaultdict(Fraction)
        plan = terms.plan
        for span in spans:
            if span.state.plan is None:
                continue
            slug, included = self._terms.plans.of(span.state.plan, span.end - 1)
            plan = terms.plan or slug
            for meter, quantity in included.items():
                sums[meter] += Fraction(quantity * (span.end - span.start), month)
        # `int` cuts the fraction off. With 1/2 added before, halves are rounded up.
        shares = {meter: int(total + Fraction(1, 2)) for meter, total in sums.items()}
        return Included(plan, shares, price_source=unprorated.price_source)


def _month_length(terms: Iterable[tuple[str, str]], start: int, end: int) -> int:
    """Return the length (µs) of the billing month that contains a billing period. Most periods are a whole month.

    Each of the `terms` is a time zone and an anchor day.
    """
    months = [Timeline(timezone, anchor).at(end - 1) for timezone, anchor in terms]
    if any((month.start, month.end) == (start, end) for month in months):
        return end - start
    # The period is only a part of a month, because the terms changed. Prefer a month that ends when the period ends.
    month = next((month for month in months if month.end == end), months[0])
    return month.end - month.start
