"""Finalised report lines as the usage events of billing systems: Stripe's meter events, Lago's events.

Such an event cannot be taken back, so provisional lines are left out. Whom an event is about is the billing system's
own name of the account, from `BILLING_CUSTOMER`; accounts without one are billed elsewhere and left out.

The fields are those of https://docs.stripe.com/api/billing/meter-event/create and
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

#: How old an event may be that Stripe takes, and how far ahead, in µs.
STRIPE_OLDEST, STRIPE_NEWEST = 35 * 86_400 * SECOND, 5 * 60 * SECOND
#: Events in one request to Lago.
LAGO_BATCH = 100

_STRIPE = '{"event_name":%s,"payload":{"stripe_customer_id":%s,"value":"%d"},"identifier":%s,"timestamp":%d}'
_LAGO = (
    '{"transaction_id":%s,"external_subscription_id":%s,"code":%s,"timestamp":%d,"properties":{'
    '"consumed_quantity":"%d","included_quantity":"%d","overage_quantity":"%d","refunded_quantity":"%d",'
    '"key":%s,"rule":%s,"plan":%s}}'
)


class NotAccepted(ValueError):
    """An event that the billing system would refuse."""


def stripe(rows: Iterable[Row], _version: int = VERSION) -> Iterator[bytes]:
    """Meter events of what goes beyond the plan, one a line, in chunks."""
    events = (stripe_event(row, customer) for row, customer in _billed(rows))
    return encoded(f"{event}\n" for event in events if event)


def stripe_event(row: Row, customer: str) -> str:
    """Return the meter event of a line as JSON; "" if nothing of it goes beyond the plan."""
    if not row.overage_quantity:
        return ""
    return _STRIPE % (text(row.meter), text(customer), row.overage_quantity, text(row.line_id), second(row))


def accepted_by_stripe(rows: Iterable[Row], now: int) -> Iterator[Row]:
    """Pass the rows through; raise NotAccepted at the first event that Stripe refuses at `now` (µs since 1970 UTC)."""
    name = _names()
    for row in rows:
        if row.overage_quantity and _customer(row, name):
            at = row.charge_period_end - 1
            if not now - STRIPE_OLDEST <= at <= now + STRIPE_NEWEST:
                raise NotAccepted(
                    f"Stripe takes no event of {iso(at // SECOND * SECOND)} at {iso(now // SECOND * SECOND)} (line_id "
                    f"{row.line_id}): it must be at most 35 days old and 5 minutes ahead. Send a report soon after its "
                    "period's end, and bill in another way what is older."
                )
        yield row


def lago(rows: Iterable[Row], _version: int = VERSION) -> Iterator[bytes]:
    """Events in batches of as many as Lago takes, one batch a line, in chunks."""
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
    about, labels = map(text, (row.line_id, customer, row.meter)), map(text, (row.key, row.rule, row.plan))
    return _LAGO % (*about, second(row), *quantities, *labels)


def _billed(rows: Iterable[Row]) -> Iterator[tuple[Row, str]]:
    """The final rows of accounts that the billing system knows, each with its name of the account."""
    name = _names()
    for row in rows:
        if customer := _customer(row, name):
            yield row, customer


def _customer(row: Row, name: Callable[[str], str | None]) -> str | None:
    """Whom the event of a row is about; None or "" if there is to be none."""
    return name(row.account) if row.status == FINAL and row.account else None


def _names() -> Callable[[str], str | None]:
    """What an account is called by the billing system; each account is asked about once in a while."""
    return lru_cache(maxsize=4096)(conf.BILLING_CUSTOMER or str)


def second(row: Row) -> int:
    """Return the last second within the line's span, since 1970 UTC: its end is already the next period's."""
    return (row.charge_period_end - 1) // SECOND
