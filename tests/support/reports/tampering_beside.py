"""Kinds of tampering with pushed rows, and with the configuration that bills and its history."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

from django.db import models
from django.utils import timezone

from ratelimits.billing.models import PlanPrice, PushDelivery, PushedReport, PushReceiver, Report
from ratelimits.models import (
    Access,
    Account,
    ConfigVersion,
    FrozenPeriod,
    KeyOverride,
    Plan,
    PlanInclusion,
    PlanMembership,
    Rule,
)
from ratelimits.models.versioned import versioned_models
from ratelimits.moments import moment
from ratelimits.usage.models import DurabilityGap, GapChange
from tests.support.reports.tampering import TABLES, UNIQUE, Damage, Model, kinds_of, redigest, rows, write
from tests.support.usage.traffic import at

MODELS = versioned_models()
TABLES.update(
    {
        PushedReport: frozenset({"id"}),
        PushDelivery: frozenset({"id"}),
        FrozenPeriod: frozenset({"id"}),
        **dict.fromkeys(MODELS, frozenset({"id"})),
        **{model.history.model: frozenset({"history_id"}) for model in MODELS},
    }
)
UNIQUE.update(
    {
        PushedReport: (),
        PushDelivery: ("line_id",),
        FrozenPeriod: ("start",),
        Plan: ("slug",),
        PlanInclusion: ("meter",),
        PlanPrice: ("meter",),
        Rule: ("name",),
        Account: ("identifier",),
        PlanMembership: ("key",),
        KeyOverride: ("key",),
        Access: ("target",),
        **{model.history.model: () for model in MODELS},
    }
)


def _update(model: Model, which: dict[str, Any], **values: Any) -> Damage:
    def damage() -> None:
        found = rows(model).filter(**which)
        assert found.exists()
        rows(model).filter(pk=found[0].pk).update(**values)

    return damage


def _customer_is_another() -> None:
    """Give a waiting delivery, and its event, to another customer."""
    row = rows(PushDelivery).filter(state="waiting").last()
    event = row.event.replace(f'"{row.customer}"', '"mallory"')
    assert event != row.event
    rows(PushDelivery).filter(pk=row.pk).update(customer="mallory", event=event)


def _line_is_not_pushed() -> None:
    """Remove a line's delivery, and let its report say that there was none."""
    row = rows(PushDelivery).filter(state="waiting").last()
    rows(PushDelivery).filter(pk=row.pk)._raw_delete("default")
    rows(PushedReport).filter(receiver=row.receiver_id, report=row.report_id).update(lines=models.F("lines") - 1)


def _never_pushed() -> None:
    """Let accepted lines be sent again, by removing the rows that say that they were sent."""
    row = rows(PushedReport).first()
    rows(PushDelivery).filter(receiver=row.receiver_id, report=row.report_id)._raw_delete("default")
    rows(PushedReport).filter(pk=row.pk)._raw_delete("default")


def _another_receiver() -> None:
    """Assign everything that was pushed to another billing system, so that the first gets everything again."""
    write(PushReceiver(name="lago2"))
    for model in (PushDelivery, PushedReport):
        rows(model).filter(receiver="lago").update(receiver="lago2")
    rows(PushReceiver).filter(name="lago")._raw_delete("default")


def _marked_as_pushed() -> None:
    """Mark a report as pushed, although nothing was sent."""
    planned = rows(PushedReport).filter(receiver="stripe").values("report")
    report = rows(PushedReport).filter(receiver="lago").exclude(report__in=planned).first().report_id
    write(PushedReport(receiver_id="stripe", report_id=report, lines=0))


_LATE = timezone.now() + timedelta(days=365)
OF_PUSHING: dict[str, Damage] = {
    **kinds_of(PushedReport),
    **kinds_of(PushDelivery),
    "an accepted delivery is marked as waiting": _update(
        PushDelivery, {"state": "accepted"}, state="waiting", settled_at=None, due_at=moment(0)
    ),
    "a delivery that was never sent is marked as accepted": _update(
        PushDelivery, {"state": "waiting"}, state="accepted", settled_at=moment(at("2026-11-03"))
    ),
    "a delivery is put off for a year": _update(PushDelivery, {"state": "waiting"}, due_at=_LATE),
    "a delivery that is never sent": _update(PushDelivery, {"state": "waiting"}, together=0),
    "a billing system is paused for a year": _update(PushReceiver, {"name": "stripe"}, paused_until=_LATE),
    "the customer of a delivery is changed": _customer_is_another,
    "a line is not pushed": _line_is_not_pushed,
    "the deliveries of a report are deleted": _never_pushed,
    "the name of a billing system is changed": _another_receiver,
    "a report is marked as pushed": _marked_as_pushed,
}


def _version_is_lowered() -> None:
    rows(ConfigVersion).update(version=1)


def _period_is_cut() -> None:
    """Give an account a second allowance for the second half of its month."""
    row = rows(FrozenPeriod).last()
    row.pk, row.start, row.label = None, at("2026-12-01"), "2026-12"
    row.end = row.start + 7 * 86_400 * 10**6
    write(row)


def _gap_does_not_wait() -> None:
    rows(GapChange)._raw_delete("default")


def _another_gap_waits() -> None:
    waiting = rows(GapChange).values("gap")
    rows(GapChange).update(gap_id=rows(DurabilityGap).exclude(pk__in=waiting).first().pk)


def _included_as_never_said(quantity: int) -> None:
    """Change what a plan includes, in its row and everywhere in its history."""
    row = rows(PlanInclusion).last()
    records = rows(PlanInclusion.history.model).filter(id=row.pk)
    assert records.update(quantity=quantity)
    rows(PlanInclusion).filter(pk=row.pk).update(quantity=quantity)


def _prices_are_taken_off(version: int) -> None:
    """Remove the prices from a version, and compute its digest again without the key."""
    found = Report.objects.filter(account="acme", version=version)
    assert found[0].prices
    found.update(prices={}, amounts={})
    redigest(found[0])


def _record_of_old() -> None:
    """Insert a record of an edit that nobody made, before the newest record."""
    record = rows(PlanPrice.history.model).last()
    record.pk, record.version = None, 0
    write(record)


def _unrecorded(model: Model) -> None:
    """Delete the history of a row, and change the row."""
    row = rows(model).last()
    rows(model.history.model).filter(id=row.pk)._raw_delete("default")  # type: ignore[attr-defined]
    rows(model).filter(pk=row.pk).update(since=row.since + 1)


def _since_ever(model: Model) -> None:
    rows(model).filter(pk=rows(model).last().pk).update(since=-1)


_CONFIGURED: tuple[Model, ...] = (*MODELS, FrozenPeriod)
OF_TERMS: dict[str, Damage] = {
    **{name: damage for model in _CONFIGURED for name, damage in kinds_of(model).items()},
    "the configuration's version is lowered": _version_is_lowered,
    "a period that was never used ends after a week": _period_is_cut,
    "a gap does not wait for closing": _gap_does_not_wait,
    "another gap waits for closing": _another_gap_waits,
    "what a plan includes is another quantity, and always was": lambda: _included_as_never_said(10**6),
    "the prices of a report are taken off": lambda: _prices_are_taken_off(1),
    "the prices of a further version are taken off": lambda: _prices_are_taken_off(2),
    "a record of an edit that nobody made is inserted": _record_of_old,
    **{f"{model.__name__} the history of a row is deleted": partial(_unrecorded, model) for model in MODELS},
    **{f"{model.__name__} of before its newest record": partial(_since_ever, model) for model in MODELS},
}
#: The tampering with the history. The manifest has a digest of it, and each row must equal its newest record.
OF_HISTORY: dict[str, Damage] = {
    name: damage for model in MODELS for name, damage in kinds_of(model.history.model).items()
}
