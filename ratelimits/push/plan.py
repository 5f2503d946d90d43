"""Plan the deliveries of a report version: write them to the delivery ledger.

Each line that the version added, and that has something to bill, gets a delivery.

All deliveries of a report version are written in one transaction. If the process dies before the commit, nothing is
planned, and the next call finds the report version again. After the commit, this report version is never planned again.
So each of these lines has exactly one delivery for each receiver.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime
from itertools import islice

from django.db import InterfaceError, OperationalError, transaction
from django.db.models import Exists, OuterRef, QuerySet

from ratelimits.conf import conf
from ratelimits.engine.keys import LONGEST_NAME
from ratelimits.models import PushDelivery, PushedReport, PushReceiver, Report
from ratelimits.models.accounts.named import of_tokens
from ratelimits.moments.databases import now_of
from ratelimits.progress import Progress
from ratelimits.push.receivers import Receiver
from ratelimits.reports.exports.billing import last_second
from ratelimits.reports.periods import SECOND, moment
from ratelimits.reports.rows import Row
from ratelimits.reports.statements import version_rows
from ratelimits.usage import crash

logger = logging.getLogger(__name__)

#: Maximum number of reports that are planned in one transaction.
_MAX_REPORTS = 100
#: Maximum number of deliveries that one statement writes.
_CHUNK = 1000

State = PushDelivery.State


def plan(receiver: Receiver, now: datetime | None = None, progress: Progress | None = None) -> int:
    """Plan all reports that `unplanned` returns; return the number of new deliveries. `progress` counts the reports.

    Some reports cannot be planned, for example because CUSTOMER raises an error. They are logged and skipped, and the
    next call tries them again.
    """
    now = now or now_of(conf.DATABASE)
    planned, last_pk = 0, 0
    total = unplanned(receiver).count() if progress is not None else None
    count = (progress or Progress()).counter(f"reports for {receiver.name}", total)
    while True:
        with transaction.atomic(using=conf.DATABASE, durable=True):
            PushReceiver.lock(conf.DATABASE, receiver.name)
            crash.reached("push:locked")
            reports = list(unplanned(receiver).filter(pk__gt=last_pk)[:_MAX_REPORTS])
            customers = of_tokens(conf.DATABASE, {report.customer_id for report in reports})
            for report in reports:
                try:
                    with transaction.atomic(using=conf.DATABASE):
                        planned += _plan(receiver, report, customers[report.customer_id].billed_account, now)
                except (OperationalError, InterfaceError):
                    raise  # The database failed, so the next report would fail too.
                except Exception:
                    logger.exception(
                        "Report %r cannot be pushed to %s; other reports are pushed", str(report), receiver.name
                    )
                last_pk = report.pk
                count(1)
            crash.reached("push:planned")
        crash.reached("push:plan-committed")
        if len(reports) < _MAX_REPORTS:
            return planned


def unplanned(receiver: Receiver) -> QuerySet[Report]:
    """Return the report versions whose lines are not in the delivery ledger yet, oldest first.

    Reports of months before the receiver's SINCE are left out.
    """
    planned = PushedReport.objects.filter(receiver=receiver.name, report=OuterRef("pk"))
    reports = Report.objects.using(conf.DATABASE).filter(label__gte=receiver.since)
    return reports.exclude(Exists(planned)).order_by("pk")


def deliveries(receiver: Receiver, report: Report, account: str, now: datetime) -> Iterator[PushDelivery]:
    """Yield an unsaved delivery for each line that a report version added.

    `account` is that of `billed_account`. Lines with nothing to bill are left out. Raise the errors of `rendered`.
    """
    for row in version_rows(report):
        delivery = _delivery(receiver, report, row, account, now)
        if delivery is not None:
            yield delivery


def billed_account(report: Report) -> str:
    """Return the account under which billing systems know the customer of a report now; "" if it has none."""
    return of_tokens(conf.DATABASE, [report.customer_id])[report.customer_id].billed_account


def rendered(receiver: Receiver, row: Row, account: str) -> tuple[str, str]:
    """Return the customer and the event of a line. The customer is "" if the receiver does not bill the account.

    `account` is that of `billed_account`.

    Raise ValueError if the function CUSTOMER returns neither None nor a text of at most 255 characters. Errors
    that CUSTOMER raises are not caught.
    """
    customer: object = (receiver.customer(account) or "") if account else ""
    if not isinstance(customer, str) or len(customer) > LONGEST_NAME:
        raise ValueError(
            f"CUSTOMER returns {customer!r:.80} for {account!r}: it must return a text of at most {LONGEST_NAME}"
            " characters, or None"
        )
    return customer, receiver.service.event(row, customer)


def _plan(receiver: Receiver, report: Report, account: str, now: datetime) -> int:
    """Write the deliveries of a report version, and mark it as planned. Return the number of deliveries."""
    unsaved, count = deliveries(receiver, report, account, now), 0
    while chunk := list(islice(unsaved, _CHUNK)):
        PushDelivery.objects.using(conf.DATABASE).bulk_create(chunk)
        count += len(chunk)
        crash.reached("push:lines-planned")
    PushedReport.objects.using(conf.DATABASE).create(receiver_id=receiver.name, report=report, lines=count)
    return count


def _delivery(receiver: Receiver, report: Report, row: Row, account: str, now: datetime) -> PushDelivery | None:
    customer, event = rendered(receiver, row, account)
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
        happened_at=moment(last_second(row) * SECOND),
        state=State.WAITING if customer else State.SKIPPED,
        together=receiver.service.max_events,  # maximum number of events in the next request with this delivery
        due_at=now,
    )
