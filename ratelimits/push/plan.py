"""Planning: the lines that a version of a report brought in become rows of the delivery ledger, in one transaction.

Whoever dies before that has planned nothing, and the next look finds the report again; after it the report is never
looked at again. So each line has one delivery for each receiver, with one identity and one text.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime
from itertools import islice

from django.db import InterfaceError, OperationalError, transaction
from django.db.models import Exists, OuterRef, QuerySet
from django.utils import timezone

from ratelimits.conf import conf
from ratelimits.models import PushDelivery, PushedReport, PushReceiver, Report
from ratelimits.push.receivers import Receiver
from ratelimits.reports.exports.billing import second
from ratelimits.reports.periods import SECOND, moment, month_of, month_window
from ratelimits.reports.rows import Row
from ratelimits.reports.statements import version_rows
from ratelimits.usage import crash

logger = logging.getLogger(__name__)

#: Reports that are planned in one transaction, and deliveries that are written by one statement.
REPORTS, CHUNK = 100, 1000

_LONGEST_CUSTOMER = 255

State = PushDelivery.State


def plan(receiver: Receiver, now: datetime | None = None) -> int:
    """Plan what a receiver lacks of all finalised reports since its SINCE; return how many lines that were.

    A report that cannot be planned (CUSTOMER raises, say) is logged, keeps no other from it, and is tried again by the
    next call.
    """
    now = now or timezone.now()
    lines, last = 0, 0
    while True:
        with transaction.atomic(using=conf.DATABASE, durable=True):
            PushReceiver.lock(conf.DATABASE, receiver.name)
            crash.reached("push:locked")
            reports = list(unplanned(receiver).filter(pk__gt=last)[:REPORTS])
            for report in reports:
                try:
                    with transaction.atomic(using=conf.DATABASE):
                        lines += _plan(receiver, report, now)
                except (OperationalError, InterfaceError):
                    raise  # the database, not a report
                except Exception:
                    logger.exception("Report %s cannot be pushed to %s; others are", report, receiver.name)
                last = report.pk
            crash.reached("push:planned")
        crash.reached("push:plan-committed")
        if len(reports) < REPORTS:
            return lines


def unplanned(receiver: Receiver) -> QuerySet[Report]:
    """Return the versions of reports that are not in the delivery ledger yet, in the order of their making."""
    planned = PushedReport.objects.filter(receiver=receiver.name, report=OuterRef("pk"))
    start, _end = month_window(receiver.since)
    reports = Report.objects.using(conf.DATABASE).filter(period_start__gte=start)
    # The window begins where the month begins first; some periods that start then are of the month before.
    around = reports.filter(period_start__lt=start + 26 * 3600 * SECOND).order_by()
    for at, timezone_ in around.values_list("period_start", "timezone").distinct():
        if month_of(at, timezone_) < receiver.since:
            reports = reports.exclude(period_start=at, timezone=timezone_)
    return reports.exclude(Exists(planned)).order_by("pk")


def deliveries(receiver: Receiver, report: Report, now: datetime) -> Iterator[PushDelivery]:
    """Yield what a receiver is to get of the lines that a version of a report brought in."""
    for row in version_rows(report):
        delivery = _delivery(receiver, report, row, now)
        if delivery is not None:
            yield delivery


def rendered(receiver: Receiver, row: Row) -> tuple[str, str]:
    """Return the customer and the event of a line; "" for a customer whom the receiver does not bill.

    Raises ValueError for a customer that is no text, and whatever CUSTOMER raises.
    """
    customer: object = (receiver.customer(row.account) or "") if row.account else ""
    if not isinstance(customer, str) or len(customer) > _LONGEST_CUSTOMER:
        raise ValueError(
            f"CUSTOMER answers {customer!r:.80} for {row.account!r}: it must be a text of at most {_LONGEST_CUSTOMER}"
            " characters, or None"
        )
    return customer, receiver.service.event(row, customer)


def _plan(receiver: Receiver, report: Report, now: datetime) -> int:
    found, count = deliveries(receiver, report, now), 0
    while chunk := list(islice(found, CHUNK)):
        PushDelivery.objects.using(conf.DATABASE).bulk_create(chunk)
        count += len(chunk)
        crash.reached("push:lines-planned")
    PushedReport.objects.using(conf.DATABASE).create(receiver_id=receiver.name, report=report, lines=count)
    return count


def _delivery(receiver: Receiver, report: Report, row: Row, now: datetime) -> PushDelivery | None:
    customer, event = rendered(receiver, row)
    if not event:
        return None
    return PushDelivery(
        receiver_id=receiver.name,
        report=report,
        line_id=row.line_id,
        customer=customer,
        meter=row.meter,
        overage=row.overage_quantity,
        event=event if customer else "",
        happened_at=moment(second(row) * SECOND),
        state=State.WAITING if customer else State.SKIPPED,
        together=receiver.service.together,
        due_at=now,
    )
