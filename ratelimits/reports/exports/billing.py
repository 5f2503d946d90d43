"""Finalised report lines as usage events for billing systems: Stripe's meter events and Lago's events.

A sent event cannot be undone, so provisional lines are left out. Each event names a customer: what the billing system
calls the account. The function in the setting `BILLING_CUSTOMER` returns this name. If it returns none, the account is
billed elsewhere, and its lines are left out.

The fields of the events are defined at https://docs.stripe.com/api/billing/meter-event/create and
https://getlago.com/docs/api-reference/events/batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import islice

from ratelimits.conf import conf
from ratelimits.reports.exports.chunks import encoded
from ratelimits.reports.exports.json import text
from ratelimits.reports.periods import SECOND, iso
from ratelimits.reports.rows import FINAL, VERSION, Row

#: How far in the past and in the future (µs) Stripe accepts an event.
STRIPE_OLDEST, STRIPE_NEWEST = 35 * 86_400 * SECOND, 5 * 60 * SECOND
#: Maximum number of events in one request to Lago.
LAGO_BATCH = 100

_STRIPE = '{"event_name":%s,"payload":{"stripe_customer_id":%s,"value":"%d"},"identifier":%s,"timestamp":%d}'
_LAGO = (
    '{"transaction_id":%s,"external_subscription_id":%s,"code":%s,"timestamp":%d,"properties":{'
    '"consumed_quantity":"%d","included_quantity":"%d","overage_quantity":"%d","refunded_quantity":"%d",'
    '"key":%s,"rule":%s,"plan":%s}}'
)


class NotAccepted(ValueError):
    """Raised for an event that the billing system would refuse."""


def stripe(rows: Iterable[Row], _version: int = VERSION) -> Iterator[bytes]:
    """Yield chunks of meter events, one event per text line, for the report lines that have overage."""
    events = (stripe_event(row, customer) for row, customer in _billed(rows))
    return encoded(f"{event}\n" for event in events if event)


def stripe_event(row: Row, customer: str) -> str:
    """Return the meter event of a line as JSON; "" if it has no overage."""
    if not row.overage_quantity:
        return ""
    return _STRIPE % (text(row.meter), text(customer), row.overage_quantity, text(row.line_id), second(row))


def accepted_by_stripe(rows: Iterable[Row], now: int) -> Iterator[Row]:
    """Yield the rows. Raise NotAccepted at the first event that Stripe would refuse at `now` (µs since 1970 UTC)."""
    name = _names()
    for row in rows:
        if row.overage_quantity and _customer(row, name):
            at = row.charge_period_end - 1
            if not now - STRIPE_OLDEST <= at <= now + STRIPE_NEWEST:
                raise NotAccepted(
                    f"Stripe accepts no event of {iso(at // SECOND * SECOND)} at {iso(now // SECOND * SECOND)} (line_id"
                    f" {row.line_id}): it must be at most 35 days old and at most 5 minutes ahead. Send a report soon"
                    " after its period's end, and bill older usage in another way."
                )
        yield row


def lago(rows: Iterable[Row], _version: int = VERSION) -> Iterator[bytes]:
    """Yield chunks of batches, one batch per text line. A batch has as many events as Lago accepts."""
    return encoded(_batches(rows))


def _batches(rows: Iterable[Row]) -> Iterator[str]:
    events = filter(None, (lago_event(row, customer) for row, customer in _billed(rows)))
    while batch := list(islice(events, LAGO_BATCH)):
        yield f'{{"events":[{",".join(batch)}]}}\n'


def lago_event(row: Row, customer: str) -> str:
    """Return the event of a line as JSON; "" if it has no quantity."""
    quantities = row.consumed_quantity, row.included_quantity, row.overage_quantity, row.refunded_quantity
    if not any(quantities):
        return ""
    names, labels = map(text, (row.line_id, customer, row.meter)), map(text, (row.key, row.rule, row.plan))
    return _LAGO % (*names, second(row), *quantities, *labels)


def _billed(rows: Iterable[Row]) -> Iterator[tuple[Row, str]]:
    """Yield the final rows of accounts that the billing system bills, each with its customer."""
    name = _names()
    for row in rows:
        if customer := _customer(row, name):
            yield row, customer


def _customer(row: Row, name: Callable[[str], str | None]) -> str | None:
    """Return the customer of a row's event; None or "" if there is no event for it."""
    return name(row.account) if row.status == FINAL and row.account else None


def _names() -> Callable[[str], str | None]:
    """Return a cached function that gives the billing system's customer for an account."""
    return lru_cache(maxsize=4096)(conf.BILLING_CUSTOMER or str)


def second(row: Row) -> int:
    """Return the last second (since 1970 UTC) of the line's charge period: the end belongs to the next period."""
    return (row.charge_period_end - 1) // SECOND
