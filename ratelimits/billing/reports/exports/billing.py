"""Write final report lines as usage events for billing systems: meter events of Stripe, and events of Lago.

An event cannot be undone after it was sent, so provisional lines are left out. Each event names a customer: this is the
account's name in the billing system. The function in the setting `BILLING_CUSTOMER` returns the customer. If it returns
no customer, the account is billed in another way, and its lines are left out.

The fields of the events are defined at https://docs.stripe.com/api/billing/meter-event/create and
https://getlago.com/docs/api-reference/events/batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice

from ratelimits.billing.reports.exports.json import text
from ratelimits.billing.reports.rows import FINAL, VERSION, Row
from ratelimits.conf import conf
from ratelimits.files import encoded
from ratelimits.usage.periods import SECOND, iso

#: Maximum age (µs) of an event that Stripe accepts.
STRIPE_MAX_AGE = 35 * 86_400 * SECOND
#: How far in the future (µs) an event can be that Stripe accepts.
_STRIPE_MAX_AHEAD = 5 * 60 * SECOND
#: Maximum number of events in one request to Lago.
LAGO_BATCH = 100

#: Templates of the events. An encoder for JSON would take many times as long.
_STRIPE = '{"event_name":%s,"payload":{"stripe_customer_id":%s,"value":"%d"},"identifier":%s,"timestamp":%d}'
_LAGO = (
    '{"transaction_id":%s,"external_subscription_id":%s,"code":%s,"timestamp":%d,"properties":{'
    '"consumed_quantity":"%d","included_quantity":"%d","overage_quantity":"%d","refunded_quantity":"%d",'
    '"key":%s,"rule":%s,"plan":%s}}'
)


class NotAccepted(ValueError):
    """Raised for an event that the billing system would refuse."""


def stripe(rows: Iterable[Row], _version: int = VERSION) -> Iterator[bytes]:
    """Yield meter events for the final report lines with overage, one event on each line of text, in chunks."""
    events = (stripe_event(row, customer) for row, customer in _billed(rows))
    return encoded(f"{event}\n" for event in events if event)


def stripe_event(row: Row, customer: str) -> str:
    """Return the meter event for a report line as JSON; "" if the line has no overage."""
    if not row.overage_quantity:
        return ""
    return _STRIPE % (text(row.meter), text(customer), row.overage_quantity, text(row.line_id), last_second(row))


def accepted_by_stripe(rows: Iterable[Row], now: int) -> Iterator[Row]:
    """Yield the rows. Raise NotAccepted at the first event that Stripe would refuse at `now` (µs since 1970 UTC)."""
    customer_of = _cached_customer_function()
    for row in rows:
        if row.overage_quantity and _customer(row, customer_of):
            event_time = row.charge_period_end - 1
            if not now - STRIPE_MAX_AGE <= event_time <= now + _STRIPE_MAX_AHEAD:
                raise NotAccepted(
                    f"Stripe refuses the event of line_id {row.line_id}. The time of the event is"
                    f" {iso(event_time // SECOND * SECOND)}, and now it is {iso(now // SECOND * SECOND)}. An event must"
                    " be at most 35 days old and at most 5 minutes in the future. Send a report soon after the end of"
                    " its period, and bill older usage in another way."
                )
        yield row


def lago(rows: Iterable[Row], _version: int = VERSION) -> Iterator[bytes]:
    """Yield batches of events, one batch of at most LAGO_BATCH events on each line of text, in chunks."""
    return encoded(_batches(rows))


def _batches(rows: Iterable[Row]) -> Iterator[str]:
    events = filter(None, (lago_event(row, customer) for row, customer in _billed(rows)))
    while batch := list(islice(events, LAGO_BATCH)):
        yield f'{{"events":[{",".join(batch)}]}}\n'


def lago_event(row: Row, customer: str) -> str:
    """Return the event for a report line as JSON; "" if all quantities of the line are 0."""
    quantities = row.consumed_quantity, row.included_quantity, row.overage_quantity, row.refunded_quantity
    if not any(quantities):
        return ""
    names = map(text, (row.line_id, customer, row.meter))
    properties = map(text, (row.key, row.rule, row.plan))
    return _LAGO % (*names, last_second(row), *quantities, *properties)


def _billed(rows: Iterable[Row]) -> Iterator[tuple[Row, str]]:
    """Yield the final rows of accounts that the billing system bills, each with its customer."""
    customer_of = _cached_customer_function()
    for row in rows:
        if customer := _customer(row, customer_of):
            yield row, customer


def _customer(row: Row, customer_of: Callable[[str], str | None]) -> str | None:
    """Return the customer of a row's event; None or "" if the row gets no event."""
    return customer_of(row.account) if row.status == FINAL and row.account else None


def _cached_customer_function() -> Callable[[str], str | None]:
    """Return a function that gives the customer for an account, and stores its results in a cache.

    If BILLING_CUSTOMER is not set, `str` returns the account itself as the customer.
    """
    return lru_cache(maxsize=4096)(conf.BILLING_CUSTOMER or str)


def last_second(row: Row) -> int:
    """Return the last second (since 1970 UTC) of a line's charge period. The end itself belongs to the next period."""
    return (row.charge_period_end - 1) // SECOND
