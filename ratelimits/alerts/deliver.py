"""Delivering: each delivery is claimed for a while, made, and then marked as done.

Who dies in between leaves it claimed; when the claim has run out it is made again, under the same id. So nothing is
lost, and what comes twice can be recognised.
"""

from __future__ import annotations

import logging
import random
from datetime import datetime, timedelta
from email.utils import parseaddr
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core.mail import EmailMessage, get_connection
from django.core.mail.backends.smtp import EmailBackend as SMTPBackend
from django.db.models import F
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.module_loading import import_string

from ratelimits.alerts import webhook
from ratelimits.conf import conf
from ratelimits.models import Account, Alert, AlertDelivery
from ratelimits.models.ledger import moment
from ratelimits.reports.periods import SECOND
from ratelimits.signals import threshold_reached
from ratelimits.usage import crash

logger = logging.getLogger(__name__)

#: For this long a delivery is its claimer's: longer than an attempt may take, or another would be made beside it.
CLAIM = timedelta(minutes=5)
#: A Celery worker breaks off an attempt that takes longer (s); longer than the longest ALERT_TIMEOUT.
LONGEST = 120
#: Longest wait for one reply of a mail server (s): all twelve of a delivery must end within the claim.
LONGEST_REPLY = 20
#: The pause after the first failed attempt; each further one is twice as long, up to the longest.
FIRST_PAUSE, LONGEST_PAUSE = timedelta(seconds=30), timedelta(hours=6)
#: Attempts after which a delivery is given up, about a day and a half after the first.
ATTEMPTS = 16
_AT_ONCE = 1000

State = AlertDelivery.State


class Gone(Exception):
    """There is nowhere to deliver to any more."""

    final = True


def due(now: datetime | None = None) -> list[UUID]:
    """The deliveries to be made now, the oldest first; not all of very many."""
    rows = AlertDelivery.objects.using(conf.DATABASE).filter(state=State.WAITING, due_at__lte=now or timezone.now())
    return list(rows.order_by("due_at").values_list("pk", flat=True)[:_AT_ONCE])


def deliver(name: UUID, now: datetime | None = None) -> bool:
    """Make one delivery, if it is due and nobody else's; whether it arrived."""
    now = now or timezone.now()
    rows = AlertDelivery.objects.using(conf.DATABASE).filter(pk=name)
    crash.reached("alerts:due")
    if not rows.filter(state=State.WAITING, due_at__lte=now).update(attempts=F("attempts") + 1, due_at=now + CLAIM):
        return False
    crash.reached("alerts:claimed")
    delivery = rows.select_related("alert", "channel").get()
    try:
        _send(delivery, now)
    except Exception as failure:  # noqa: BLE001  (whatever a receiver or a mail backend raises)
        _note(delivery, failure, now)
        return False
    crash.reached("alerts:sent")
    rows.update(state=State.DONE, done_at=now, error="")
    crash.reached("alerts:marked")
    return True


def _note(delivery: AlertDelivery, failure: Exception, now: datetime) -> None:
    given_up = getattr(failure, "final", False) or delivery.attempts >= ATTEMPTS
    reason = f"{type(failure).__name__}: {failure}"
    log = logger.error if given_up else logger.warning
    log("%s of alert %s failed, attempt %s: %s", delivery.kind, delivery.alert, delivery.attempts, reason)
    # Only of the attempt that failed: another one may have begun since.
    rows = AlertDelivery.objects.using(conf.DATABASE).filter(pk=delivery.pk, attempts=delivery.attempts)
    rows.filter(state=State.WAITING).update(
        state=State.FAILED if given_up else State.WAITING,
        due_at=now + pause(delivery.attempts),
        error=reason[:300],
    )


def pause(attempts: int) -> timedelta:
    """How long to wait after so many failed attempts; up to a tenth longer, so that not all come at once."""
    longer = 1 + random.random() / 10  # noqa: S311
    return min(FIRST_PAUSE * float(2 ** (attempts - 1)), LONGEST_PAUSE) * longer


def _send(delivery: AlertDelivery, now: datetime) -> None:
    channel = delivery.channel
    if delivery.kind == AlertDelivery.Kind.SIGNAL:
        for _receiver, answer in threshold_reached.send_robust(sender=Alert, alert=delivery.alert):
            if isinstance(answer, Exception):
                raise answer
    elif channel is None or not channel.active:
        raise Gone("the channel is there no more")
    elif delivery.kind == AlertDelivery.Kind.EMAIL:
        if not channel.email:
            raise Gone("the channel has no e-mail address any more")
        mail(delivery, channel.email).send()
    elif not channel.webhook_url:
        raise Gone("the channel has no webhook any more")
    else:
        content = webhook.body(delivery.alert)
        fields = webhook.headers(channel.secret, delivery.pk, int(now.timestamp()), content)
        webhook.post(channel.webhook_url, content, fields, conf.ALERT_TIMEOUT)


def mail(delivery: AlertDelivery, address: str) -> EmailMessage:
    """The e-mail of a delivery; projects may have templates of their own for it."""
    alert = delivery.alert
    account = Account.objects.using(conf.DATABASE).filter(identifier=alert.account).first()
    values = {
        "alert": alert,
        "account": account or alert.account,
        "unit": conf.UNITS.get(alert.meter) or alert.meter,
        "period_start": moment(alert.period * SECOND),
        "period_end": moment(alert.period_end * SECOND),
        "timezone": account.timezone if account is not None else "UTC",
    }
    subject = " ".join(render_to_string("ratelimits/alerts/subject.txt", values).split())
    host = parseaddr(settings.DEFAULT_FROM_EMAIL)[1].rpartition("@")[2] or "localhost"
    # Always the same, so that a mailbox shows a repetition as what it is.
    fields = {"Message-ID": f"<{delivery.pk}@{host}>"}
    text = render_to_string("ratelimits/alerts/body.txt", values)
    return EmailMessage(subject, text, to=[address], headers=fields, connection=_connection())


def _connection() -> Any:
    """The project's mail backend; one that speaks SMTP waits for each reply for a bounded time."""
    if not issubclass(import_string(settings.EMAIL_BACKEND), SMTPBackend):
        return get_connection()
    asked = settings.EMAIL_TIMEOUT or conf.ALERT_TIMEOUT
    return get_connection(timeout=min(asked, conf.ALERT_TIMEOUT, LONGEST_REPLY))
