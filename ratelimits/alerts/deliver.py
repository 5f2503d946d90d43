"""Deliveries of alerts: a process claims a delivery for some minutes, sends it, and then marks it as done.

If the process dies in between, the claim ends and the delivery is sent again, with the same id. So no alert is lost,
and a receiver can recognise a repetition.
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

#: How long a delivery belongs to the process that claimed it: a claim moves `due_at` into the future. An attempt takes
#: less time.
CLAIM = timedelta(minutes=5)
#: Time limit (s) of an attempt in a Celery worker. It is longer than the longest allowed ALERT_TIMEOUT.
MAX_ATTEMPT = 120
#: Maximum wait (s) for one reply of a mail server. An e-mail takes twelve replies, and all must come within CLAIM.
MAX_REPLY = 20
#: Pause after the first failed attempt, and the longest pause. Each pause is twice as long as the previous pause.
FIRST_PAUSE, MAX_PAUSE = timedelta(seconds=30), timedelta(hours=6)
#: Number of attempts after which a delivery is given up, about a day and a half after the first.
MAX_ATTEMPTS = 16
_MAX_DUE = 1000

State = AlertDelivery.State


class Gone(Exception):
    """Raised if the channel no longer exists, is not active, or no longer has the address."""

    #: No further attempt is made after this failure.
    final = True


def due(now: datetime | None = None) -> list[UUID]:
    """Return at most 1000 deliveries that are due, the oldest `due_at` first."""
    rows = AlertDelivery.objects.using(conf.DATABASE).filter(state=State.WAITING, due_at__lte=now or timezone.now())
    return list(rows.order_by("due_at").values_list("pk", flat=True)[:_MAX_DUE])


def deliver(name: UUID, now: datetime | None = None) -> bool:
    """Claim and send one delivery, if it is due and no other process has claimed it; return whether it succeeded."""
    now = now or timezone.now()
    rows = AlertDelivery.objects.using(conf.DATABASE).filter(pk=name)
    crash.reached("alerts:due")
    if not rows.filter(state=State.WAITING, due_at__lte=now).update(attempts=F("attempts") + 1, due_at=now + CLAIM):
        return False
    crash.reached("alerts:claimed")
    delivery = rows.select_related("alert", "channel").get()
    try:
        _send(delivery, now)
    except Exception as failure:  # noqa: BLE001  (a receiver or a mail backend can raise anything)
        _record_failure(delivery, failure, now)
        return False
    crash.reached("alerts:sent")
    rows.update(state=State.DONE, done_at=now, error="")
    crash.reached("alerts:marked")
    return True


def _record_failure(delivery: AlertDelivery, failure: Exception, now: datetime) -> None:
    given_up = getattr(failure, "final", False) or delivery.attempts >= MAX_ATTEMPTS
    reason = f"{type(failure).__name__}: {failure}"
    log = logger.error if given_up else logger.warning
    log("%s of alert %s failed, attempt %s: %s", delivery.kind, delivery.alert, delivery.attempts, reason)
    # Write this only if no newer attempt has begun.
    rows = AlertDelivery.objects.using(conf.DATABASE).filter(pk=delivery.pk, attempts=delivery.attempts)
    rows.filter(state=State.WAITING).update(
        state=State.FAILED if given_up else State.WAITING,
        due_at=now + pause(delivery.attempts),
        error=reason[:300],
    )


def pause(attempts: int) -> timedelta:
    """Return the pause after this number of failed attempts. Up to a tenth is added at random, to spread retries."""
    jitter = 1 + random.random() / 10  # noqa: S311
    return min(FIRST_PAUSE * float(2 ** (attempts - 1)), MAX_PAUSE) * jitter


def _send(delivery: AlertDelivery, now: datetime) -> None:
    channel = delivery.channel
    if delivery.kind == AlertDelivery.Kind.SIGNAL:
        for _receiver, answer in threshold_reached.send_robust(sender=Alert, alert=delivery.alert):
            if isinstance(answer, Exception):
                raise answer
    elif channel is None or not channel.active:
        raise Gone("the channel no longer exists or is not active")
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
    """Return the e-mail of a delivery, rendered from templates that a project can replace."""
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
    # The Message-ID is the same in every attempt, so that a mail program can recognise a repetition.
    fields = {"Message-ID": f"<{delivery.pk}@{host}>"}
    text = render_to_string("ratelimits/alerts/body.txt", values)
    return EmailMessage(subject, text, to=[address], headers=fields, connection=_connection())


def _connection() -> Any:
    """Return a connection of the project's mail backend, with a time limit for replies if it uses SMTP."""
    if not issubclass(import_string(settings.EMAIL_BACKEND), SMTPBackend):
        return get_connection()
    timeout = settings.EMAIL_TIMEOUT or conf.ALERT_TIMEOUT
    return get_connection(timeout=min(timeout, conf.ALERT_TIMEOUT, MAX_REPLY))
