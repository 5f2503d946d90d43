"""Verify the delivery ledger.

Each report line with something to bill must have one delivery with the same values. The values of a waiting delivery
must not prevent it from being sent. Only the billing system knows which events it accepted. So the state of a delivery
is compared only with the other columns of its row.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from functools import reduce
from itertools import groupby, islice
from operator import or_
from typing import Any

from django.db.models import Count, Exists, OuterRef, Q

from ratelimits.billing.models import PushDelivery, PushedReport, PushReceiver, Report
from ratelimits.billing.push.deliveries import CLAIM, MAX_PAUSE
from ratelimits.billing.push.receivers import MAX_WAIT, SERVICES, Service
from ratelimits.billing.reports.exports.billing import last_second
from ratelimits.billing.reports.rows import Row
from ratelimits.billing.reports.statements import version_rows
from ratelimits.conf import conf
from ratelimits.moments import moment, now_of
from ratelimits.usage.periods import SECOND

#: Maximum number of rows that are read together.
_CHUNK = 500
#: Maximum time from now until a waiting delivery is due, or until the pause of a receiver ends. A pause lasts for at
#: most MAX_WAIT. After a failure, a delivery waits for at most 2 * MAX_PAUSE or for the pause of its receiver.
#: CLAIM is added as a margin.
_MAX_DELAY = max(timedelta(seconds=MAX_WAIT), 2 * MAX_PAUSE) + CLAIM
#: Fields of an event that are allowed to differ, because settings or the version of the app can change.
_IGNORED = ("source", "dataschema")

State = PushDelivery.State
#: The states of deliveries that are never sent again: accepted, or billed in another way.
_SETTLED = (State.ACCEPTED, State.ELSEWHERE)


def verify_pushed(using: str, checked: Counter[str]) -> Iterator[str]:
    """Yield a finding for each delivery that differs from its report line, or that would never be sent.

    Add the number of deliveries to `checked`.
    """
    planned = PushedReport.objects.using(using).order_by("report_id", "receiver_id").select_related("report")
    for _report, group in groupby(planned.iterator(_CHUNK), key=lambda pushed: pushed.report_id):
        yield from _verify_report(using, list(group), checked)
    planned_report = PushedReport.objects.filter(receiver=OuterRef("receiver"), report=OuterRef("report"))
    for delivery in PushDelivery.objects.using(using).filter(~Exists(planned_report)).order_by("pk").iterator(_CHUNK):
        yield f"delivery {delivery} belongs to a report that was not planned for {delivery.receiver_id}"
    yield from _verify_states(using)


def _verify_report(using: str, planned: list[PushedReport], checked: Counter[str]) -> Iterator[str]:
    report: Report = planned[0].report
    titles = {pushed.receiver_id: f"pushing {report} to {pushed.receiver_id}" for pushed in planned}
    services = {name: _service(name) for name in titles}
    deliveries = PushDelivery.objects.using(using).filter(report=report)
    # For each receiver, the number of deliveries that belong to a line of this report.
    with_line: Counter[str] = Counter()
    rows = version_rows(report)
    while chunk := {row.line_id: row for row in islice(rows, _CHUNK)}:
        by_line = {
            (delivery.receiver_id, delivery.line_id): delivery for delivery in deliveries.filter(line_id__in=chunk)
        }
        with_line.update(name for name, _line in by_line)
        for name, title in titles.items():
            for line, row in chunk.items():
                yield from (f"{title}: {error}" for error in _errors(services[name], row, by_line.get((name, line))))
    # Nothing was added while the lines were read: all deliveries of a report are written in one transaction.
    counts = dict(deliveries.order_by().values_list("receiver").annotate(Count("pk")))
    for pushed in planned:
        name, count = pushed.receiver_id, counts.get(pushed.receiver_id, 0)
        checked["deliveries"] += count
        if count != pushed.lines:
            yield f"{titles[name]}: {pushed.lines} lines were planned, and the delivery ledger has {count}"
        if count != with_line[name]:
            yield f"{titles[name]}: {count - with_line[name]} deliveries belong to lines that the report did not add"


def _service(receiver: str) -> Service | None:
    """Return the service of a receiver; None if the settings no longer have the receiver."""
    options = conf.PUSH.get(receiver)
    return None if options is None else SERVICES.get(str(options.get("FORMAT", receiver)))


def _errors(service: Service | None, row: Row, delivery: PushDelivery | None) -> Iterator[str]:
    """Yield the differences between a line and its delivery."""
    if delivery is None:
        # Whether there is an event does not depend on the customer, so any customer can be used here.
        if service is not None and service.event(row, "somebody"):
            yield f"the line {row.line_id} has something to bill, but no delivery"
        return
    expected = row.meter, row.overage_quantity, moment(last_second(row) * SECOND)
    if (delivery.meter, delivery.overage, delivery.happened_at) != expected:
        yield f"the delivery of line {row.line_id} has another meter, overage or moment than the line"
    if delivery.event and service is not None and not _same(delivery.event, service.event(row, delivery.customer)):
        yield f"the event of line {row.line_id} differs from the event for this line and customer {delivery.customer!r}"


def _same(event: str, expected: str) -> bool:
    """Return whether two events are equal, except for the fields `_IGNORED`."""
    return bool(_compared(event) == _compared(expected))


def _compared(event: str) -> Any:
    """Return the fields of an event without `_IGNORED`. If the event is not a JSON object, return all of it."""
    try:
        content = json.loads(event)
    except (ValueError, RecursionError):
        return event
    if not isinstance(content, Mapping):
        return content
    return {name: value for name, value in content.items() if name not in _IGNORED}


def _verify_states(using: str) -> Iterator[str]:
    """Yield a finding for each delivery and billing system whose columns contradict each other."""
    latest = now_of(using) + _MAX_DELAY
    rows = PushDelivery.objects.using(using).order_by("pk")
    no_customer_or_event = Q(customer="") | Q(event="")
    # Each condition is checked by one query. A process that sends meanwhile cannot cause a finding, because it changes
    # all columns of a row in one statement.
    conditions = (
        (~Q(state__in=State.values), "has an unknown state"),
        (Q(state__in=_SETTLED, settled_at=None), "is settled, but has no time of settlement"),
        (~Q(state__in=_SETTLED) & Q(settled_at__isnull=False), "is not settled, but has a time of settlement"),
        (~Q(state__in=(State.SKIPPED, State.ELSEWHERE)) & no_customer_or_event, "has no customer or no event"),
        (Q(state=State.SKIPPED) & ~Q(customer="", event=""), "was skipped, but has a customer or an event"),
        (Q(state=State.UNSURE, unsure_since=None), "was perhaps accepted, but has no time of the lost answer"),
        (Q(state=State.WAITING, due_at__gt=latest), "waits longer than a delivery can wait"),
        (Q(state=State.WAITING, together__lt=1), "is never sent, because its next request would contain no event"),
    )
    # Wrong rows are rare, so one query first looks for all conditions together.
    any_wrong = rows.filter(reduce(or_, (condition for condition, _error in conditions))).exists()
    for condition, error in conditions if any_wrong else ():
        for row in rows.filter(condition).iterator(_CHUNK):
            yield f"delivery {row.line_id} to {row.receiver_id} {error}: {row.state}"
    for receiver in PushReceiver.objects.using(using).filter(paused_until__gt=latest).order_by("pk"):
        yield f"nothing is sent to {receiver} before {receiver.paused_until}: no failure pauses a receiver for so long"
