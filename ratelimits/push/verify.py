"""Verifying the delivery ledger: what has something to bill has one delivery, as its line says, and none is put off.

What a billing system accepted only that system can say. A delivery's state is compared with what else the row says.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import timedelta
from itertools import groupby, islice
from typing import Any

from django.db.models import Count, Exists, OuterRef, Q
from django.utils import timezone

from ratelimits.conf import conf
from ratelimits.models import PushDelivery, PushedReport, PushReceiver, Report
from ratelimits.models.ledger import moment
from ratelimits.push.receivers import SERVICES
from ratelimits.push.send import CLAIM, LONGEST_PAUSE
from ratelimits.push.service import LONGEST_WAIT, Service
from ratelimits.reports.exports.billing import second
from ratelimits.reports.periods import SECOND
from ratelimits.reports.rows import Row
from ratelimits.reports.statements import version_rows

_CHUNK = 500
#: Nothing is put off for longer than this.
_PUT_OFF = max(timedelta(seconds=LONGEST_WAIT), 2 * LONGEST_PAUSE) + CLAIM
#: What an event says that settings, or the version of the app, may have made another since.
_OF_SENDER = ("source", "dataschema")

State = PushDelivery.State
_SETTLED = (State.ACCEPTED, State.ELSEWHERE)


def verify_pushed(using: str, checked: Counter[str]) -> Iterator[str]:
    """Say which deliveries are not what the lines of their reports make, and which are kept from being sent.

    `checked` is given the number of deliveries.
    """
    planned = PushedReport.objects.using(using).order_by("report_id", "receiver_id").select_related("report")
    for _report, those in groupby(planned.iterator(_CHUNK), key=lambda each: each.report_id):
        yield from _verify_report(using, list(those), checked)
    known = PushedReport.objects.filter(receiver=OuterRef("receiver"), report=OuterRef("report"))
    for stray in PushDelivery.objects.using(using).filter(~Exists(known)).order_by("pk").iterator(_CHUNK):
        yield f"delivery {stray} is of a report that was not planned for {stray.receiver_id}"
    yield from _verify_states(using)


def _verify_report(using: str, planned: list[PushedReport], checked: Counter[str]) -> Iterator[str]:
    report: Report = planned[0].report
    names = {each.receiver_id: f"pushing {report} to {each.receiver_id}" for each in planned}
    services = {name: _service(name) for name in names}
    mine = PushDelivery.objects.using(using).filter(report=report)
    of_lines: Counter[str] = Counter()
    rows = version_rows(report)
    while chunk := {row.line_id: row for row in islice(rows, _CHUNK)}:
        found = {(each.receiver_id, each.line_id): each for each in mine.filter(line_id__in=chunk)}
        of_lines.update(name for name, _line in found)
        for name, text in names.items():
            for line, row in chunk.items():
                yield from (f"{text}: {wrong}" for wrong in _wrong(services[name], row, found.get((name, line))))
    # Counted after the lines were looked at: nothing is ever planned again.
    counts = dict(mine.order_by().values_list("receiver").annotate(Count("pk")))
    for each in planned:
        name, count = each.receiver_id, counts.get(each.receiver_id, 0)
        checked["deliveries"] += count
        if count != each.lines:
            yield f"{names[name]}: {each.lines} lines were planned, and the delivery ledger has {count}"
        if count != of_lines[name]:
            yield f"{names[name]}: {count - of_lines[name]} deliveries are of lines that the report did not bring in"


def _service(receiver: str) -> Service | None:
    """Return what kind of billing system it is; None where the settings name it no more."""
    options = conf.PUSH.get(receiver)
    return None if options is None else SERVICES.get(str(options.get("FORMAT", receiver)))


def _wrong(service: Service | None, row: Row, delivery: PushDelivery | None) -> Iterator[str]:
    """Say what of a delivery is not as its line makes it."""
    if delivery is None:
        if service is not None and service.event(row, "somebody"):
            yield f"the line {row.line_id} has something to bill, and no delivery"
        return
    expected = row.meter, row.overage_quantity, moment(second(row) * SECOND)
    if (delivery.meter, delivery.overage, delivery.happened_at) != expected:
        yield f"the delivery of line {row.line_id} has another meter, overage or moment than the line"
    if delivery.event and service is not None and not _same(delivery.event, service.event(row, delivery.customer)):
        yield f"the event of line {row.line_id} is not the one of the line and of customer {delivery.customer!r}"


def _same(event: str, expected: str) -> bool:
    return bool(_said(event) == _said(expected))


def _said(event: str) -> Any:
    try:
        found = json.loads(event)
    except (ValueError, RecursionError):
        return event
    if not isinstance(found, Mapping):
        return found
    return {name: value for name, value in found.items() if name not in _OF_SENDER}


def _verify_states(using: str) -> Iterator[str]:
    """Name the deliveries, and the billing systems, that are in no state in which pushing leaves them."""
    latest = timezone.now() + _PUT_OFF
    rows = PushDelivery.objects.using(using).order_by("pk")
    nobody = Q(customer="") | Q(event="")
    # Each by one statement: a pusher that goes on meanwhile changes all columns of a row at once.
    for condition, wrong in (
        (~Q(state__in=State.values), "is in no state that there is"),
        (Q(state__in=_SETTLED, settled_at=None), "is settled, and at no time"),
        (~Q(state__in=_SETTLED) & Q(settled_at__isnull=False), "is not settled, and says when it was"),
        (~Q(state__in=(State.SKIPPED, State.ELSEWHERE)) & nobody, "is about no customer, or has no event"),
        (Q(state=State.SKIPPED) & ~Q(customer="", event=""), "was skipped, and is about a customer"),
        (Q(state=State.UNSURE, unsure_since=None), "may have been taken, and says not since when"),
        (Q(state=State.WAITING, due_at__gt=latest), "waits for longer than anything is put off"),
        (Q(state=State.WAITING, together__lt=1), "is sent with fewer than one event a request, so never"),
    ):
        for row in rows.filter(condition).iterator(_CHUNK):
            yield f"delivery {row.line_id} to {row.receiver_id} {wrong}: {row.state}"
    for receiver in PushReceiver.objects.using(using).filter(paused_until__gt=latest).order_by("pk"):
        yield f"nothing is sent to {receiver} before {receiver.paused_until}: it is paused for longer than any failure"
