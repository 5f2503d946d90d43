"""Replacing a customer's names in tables that no bill depends on: alerts, resets, recorded requests, log entries."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from django.apps import apps
from django.db import router, transaction
from django.db.models import Q, QuerySet

from ratelimits.models import Customer, KeyReset, Move, Upload
from ratelimits.routers import own_apps
from ratelimits.usage.erasure.about import SECOND, About
from ratelimits.usage.models import Alert, AlertDelivery, RecordedRequest

#: The flag of a change in the admin's log. (Its module can be imported only if the admin is installed.)
_CHANGE = 2


def alerts_of(about: About) -> QuerySet[Alert]:
    """Return the alerts of the customer."""
    return Alert.objects.using(about.using).filter(customer=about.customer)


def erase_alerts(about: About) -> set[str]:
    """Replace the names in alerts and their deliveries. Return the primary keys of the changed alerts."""
    changed = set()
    for alert in list(alerts_of(about)):
        alert.account = about.account(alert.account)
        alert.key = about.pseudonyms.key(alert.key) if alert.key else ""
        alert.save(using=about.using)
        changed.add(str(alert.pk))
        for delivery in AlertDelivery.objects.using(about.using).filter(alert=alert).exclude(error=""):
            delivery.error = about.scrub.cut(delivery.error, 300)
            delivery.save(using=about.using)
    return changed


def moves_of(about: About) -> QuerySet[Move]:
    """Return the moves of texts from the customer or to it."""
    return Move.objects.using(about.using).filter(Q(former=about.customer) | Q(customer=about.customer))


def erase_moves(about: About) -> set[str]:
    """Replace the names in moves of the customer's texts. Return the primary keys of the changed rows."""
    changed = set()
    for move in moves_of(about):
        if move.text in about.texts:
            move.text = about.pseudonyms.account(move.text)
        move.reason = about.scrub.cut(move.reason, 200)
        move.save(using=about.using)
        changed.add(str(move.pk))
    return changed


def resets_of(about: About) -> list[KeyReset]:
    """Return the resets of the customer's limits."""
    keys = {f"account:{text}" for text in about.texts}
    rows = KeyReset.objects.using(about.using)
    return [
        reset
        for reset in [
            *rows.filter(account__in=about.texts),
            *rows.filter(key__in=keys).exclude(account__in=about.texts),
        ]
        if about.names.has(reset.account or reset.key.removeprefix("account:"), int(reset.at.timestamp()))
    ]


def erase_resets(about: About) -> set[str]:
    """Replace the names in resets of limits. Return the primary keys of the changed rows."""
    changed = set()
    for reset in resets_of(about):
        reset.account = about.pseudonyms.account(reset.account) if reset.account else ""
        reset.key, reset.reason = about.pseudonyms.key(reset.key), about.scrub.cut(reset.reason, 200)
        reset.save(using=about.using)
        changed.add(str(reset.pk))
    return changed


def recorded_of(about: About) -> tuple[list[Any], list[Upload]]:
    """Return the primary keys of recorded requests of the customer, and the uploaded files that name it."""
    keys = {f"account:{text}": text for text in about.texts}
    requests = RecordedRequest.objects.using(about.using)
    recorded = [
        pk
        for pk, account, at in requests.filter(account__in=keys).values_list("pk", "account", "at")
        if about.names.has(keys[account], at // SECOND)
    ]
    uploads = []
    for upload in Upload.objects.using(about.using).order_by("pk"):
        text = upload.raw().decode(errors="replace")
        if about.scrub(text) != text:
            uploads.append(upload)
    return recorded, uploads


def delete_recorded(about: About) -> int:
    """Delete recorded requests of the customer, and uploaded files that name it. Return how many."""
    recorded, uploads = recorded_of(about)
    count = RecordedRequest.objects.using(about.using).filter(pk__in=recorded).delete()[0]
    for upload in uploads:
        upload.delete(using=about.using)
    return count + len(uploads)


def log_erasure(customer: Customer, by: Any, why: str) -> None:
    """Write into the admin's log that a user has erased a customer. The log names the customer by its token."""
    if by is None or not apps.is_installed("django.contrib.admin"):
        return
    log_entry: Any = apps.get_model("admin", "LogEntry")
    text = f"Erased: {why}" if why else "Erased."
    log_entry.objects.log_actions(by.pk, [customer], _CHANGE, text, single_object=False)


def erase_log(about: About, changed: Mapping[str, Collection[Any]], *, count_only: bool = False) -> int:
    """Replace the names in the admin's log of these rows. Return how many entries have changed, or would change.

    `changed` has primary keys of rows, by the name of their model. The log can be in another database.
    """
    if not apps.is_installed("django.contrib.admin"):
        return 0
    log_entry: Any = apps.get_model("admin", "LogEntry")
    using, count = router.db_for_write(log_entry), 0
    labels = [config.label for config in own_apps()]
    with transaction.atomic(using=using):
        for model, pks in changed.items():
            about_model = log_entry.objects.using(using).filter(
                content_type__app_label__in=labels, content_type__model=model, object_id__in=[str(pk) for pk in pks]
            )
            for entry in about_model:
                new = about.scrub.cut(entry.object_repr, 200), about.scrub.of_json(entry.change_message)
                if new == (entry.object_repr, entry.change_message):
                    continue
                count += 1
                if not count_only:
                    log_entry.objects.using(using).filter(pk=entry.pk).update(object_repr=new[0], change_message=new[1])
    return count
