"""Deliver alerts: a process claims a delivery for a few minutes, sends the alert, and then marks the delivery as done.

If the process dies before it marks the delivery, its claim ends, and the alert is sent again with the same id. So no
alert is lost, and a receiver can recognise an alert that it has already.

Webhooks are signed as the standard https://www.standardwebhooks.com says. There are libraries for this standard, so a
receiver can check the signatures easily.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import random
from base64 import b64encode
from datetime import datetime, timedelta
from email.utils import parseaddr
from http import HTTPStatus
from typing import Any
from uuid import UUID

from django.conf import settings
from django.core import mail as django_mail
from django.core.mail import EmailMessage
from django.core.mail.backends.smtp import EmailBackend as SMTPBackend
from django.db.models import F
from django.template.loader import render_to_string

from ratelimits import moments
from ratelimits.conf import conf
from ratelimits.models import Account
from ratelimits.models.accounts.named import named
from ratelimits.moments import moment
from ratelimits.signals import threshold_reached
from ratelimits.usage.ledger import crash
from ratelimits.usage.models import Alert, AlertDelivery
from ratelimits.usage.models.alerts import secret_key
from ratelimits.usage.periods import SECOND, iso
from ratelimits.usage.posting import Connection, HttpAnswer

logger = logging.getLogger(__name__)

#: How long a claim lasts. A claim moves `due_at` this far into the future. An attempt takes less time than this.
CLAIM = timedelta(minutes=5)
#: Time limit (s) of an attempt in a Celery worker. It is longer than the longest allowed ALERT_TIMEOUT.
MAX_ATTEMPT = 120
#: Maximum wait (s) for one reply of a mail server. The server replies twelve times to an e-mail, and all replies must
#: come within `CLAIM`.
MAX_REPLY = 20
#: Pause after the first failed attempt. Each further failure doubles the pause, up to `MAX_PAUSE`.
FIRST_PAUSE, MAX_PAUSE = timedelta(seconds=30), timedelta(hours=6)
#: Maximum number of attempts. The last attempt is about a day and a half after the first attempt.
MAX_ATTEMPTS = 16
#: Maximum number of deliveries that `due` returns.
_MAX_DUE = 1000
State = AlertDelivery.State
#: The type of these webhooks.
WEBHOOK_TYPE = "ratelimits.threshold_reached"


class DestinationGone(Exception):
    """Raised if the channel no longer exists, is not active, or no longer has the e-mail address or webhook."""

    #: No further attempt is made after this failure.
    final = True


def due(now: datetime | None = None) -> list[UUID]:
    """Return the ids of at most 1000 deliveries that are due, sorted by `due_at`."""
    rows = AlertDelivery.objects.using(conf.DATABASE).filter(state=State.WAITING, due_at__lte=now or moments.now())
    return list(rows.order_by("due_at").values_list("pk", flat=True)[:_MAX_DUE])


def deliver(delivery_id: UUID, now: datetime | None = None) -> bool:
    """Claim and send one delivery; return whether it was sent.

    Do nothing if the delivery is not due, or if another process has claimed it.
    """
    now = now or moments.now()
    rows = AlertDelivery.objects.using(conf.DATABASE).filter(pk=delivery_id)
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
    # Quote the alert's text: an account's name can contain a line break, which could forge a line of the log.
    log("%s of alert %r failed, attempt %s: %s", delivery.kind, str(delivery.alert), delivery.attempts, reason)
    # If a newer attempt has begun meanwhile, write nothing: the newer attempt writes its own result.
    rows = AlertDelivery.objects.using(conf.DATABASE).filter(pk=delivery.pk, attempts=delivery.attempts)
    rows.filter(state=State.WAITING).update(
        state=State.FAILED if given_up else State.WAITING,
        due_at=now + pause(delivery.attempts),
        error=reason[:300],  # the length of the column
    )


def pause(attempts: int) -> timedelta:
    """Return the pause after this number of failed attempts.

    The pause is lengthened by a random part of up to a tenth, so that not all deliveries are sent again at one moment.
    """
    jitter = 1 + random.random() / 10  # noqa: S311
    return min(FIRST_PAUSE * float(2 ** (attempts - 1)), MAX_PAUSE) * jitter


def _send(delivery: AlertDelivery, now: datetime) -> None:
    channel = delivery.channel
    if delivery.kind == AlertDelivery.Kind.SIGNAL:
        for _receiver, answer in threshold_reached.send_robust(sender=Alert, alert=delivery.alert):
            if isinstance(answer, Exception):
                raise answer
    elif channel is None or not channel.active:
        raise DestinationGone("the channel no longer exists or is not active")
    elif delivery.kind == AlertDelivery.Kind.EMAIL:
        if not channel.email:
            raise DestinationGone("the channel no longer has an e-mail address")
        _backend().send_messages([mail(delivery, channel.email)])
    elif not channel.webhook_url:
        raise DestinationGone("the channel no longer has a webhook")
    else:
        content = webhook_body(delivery.alert)
        fields = webhook_headers(channel.secret, delivery.pk, int(now.timestamp()), content)
        post_webhook(channel.webhook_url, content, fields, conf.ALERT_TIMEOUT, public_only=conf.ALERT_PUBLIC_ONLY)


def mail(delivery: AlertDelivery, address: str) -> EmailMessage:
    """Return the e-mail of a delivery. A project can replace the templates of the subject and the text."""
    alert = delivery.alert
    (customer,) = named(conf.DATABASE, [alert.customer_id])
    # The last text of a customer whom no text names now is perhaps that of another customer.
    account = Account.objects.using(conf.DATABASE).filter(identifier__in=customer.present).order_by("pk").first()
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
    # The Message-ID is the same in every attempt, so that a mail program can recognise a repeated e-mail.
    fields = {"Message-ID": f"<{delivery.pk}@{host}>"}
    text = render_to_string("ratelimits/alerts/body.txt", values)
    return EmailMessage(subject, text, to=[address], headers=fields)


def _backend() -> Any:
    """Return the project's mail backend. If it uses SMTP, replies get a time limit."""
    mailers: Any = getattr(django_mail, "mailers", None)  # since Django 6.1, where `get_connection` is deprecated
    backend = mailers.default if mailers is not None else django_mail.get_connection()
    if isinstance(backend, SMTPBackend):
        backend.timeout = min(backend.timeout or conf.ALERT_TIMEOUT, conf.ALERT_TIMEOUT, MAX_REPLY)
    return backend


class Refused(Exception):
    """Raised if the receiver answers with an error.

    `final` is true for the status 410: the receiver will never accept webhooks again.
    """

    def __init__(self, answer: HttpAnswer) -> None:
        super().__init__(answer.summary)
        self.final = answer.status == HTTPStatus.GONE


def webhook_body(alert: Alert) -> bytes:
    """Return the webhook's body in JSON. The body has the same bytes in every attempt."""
    data = {
        "alert_id": str(alert.pk),
        "account": alert.account,
        "meter": alert.meter,
        "rule": alert.rule_name,
        "key": alert.key,
        "threshold": alert.threshold,
        "basis": str(alert.basis),
        "used": alert.used,
        "quantity": alert.quantity,
        "billing_period_start": iso(alert.period * SECOND),
        "billing_period_end": iso(alert.period_end * SECOND),
    }
    timestamp = alert.raised_at.isoformat().replace("+00:00", "Z")
    return json.dumps({"type": WEBHOOK_TYPE, "timestamp": timestamp, "data": data}, ensure_ascii=False).encode()


def signature(secret: str, webhook_id: str, timestamp: int, content: bytes) -> str:
    """Return the signature of a webhook: the HMAC-SHA256 of its id, its timestamp (s since 1970 UTC) and its body.

    The prefix "v1" is the name of this method in Standard Webhooks.
    """
    digest = hmac.digest(secret_key(secret), f"{webhook_id}.{timestamp}.".encode() + content, hashlib.sha256)
    return f"v1,{b64encode(digest).decode()}"


def webhook_headers(secret: str, webhook_id: UUID, timestamp: int, content: bytes) -> dict[str, str]:
    """Return the headers of one attempt. Every attempt has the same id, but its own timestamp and signature."""
    return {
        "Content-Type": "application/json",
        "User-Agent": "ratelimits",
        "webhook-id": str(webhook_id),
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(secret, str(webhook_id), timestamp, content),
        "Idempotency-Key": str(webhook_id),
    }


def post_webhook(
    url: str, content: bytes, fields: dict[str, str], timeout: float, *, public_only: bool = False
) -> None:
    """Send the content by POST to a URL. All steps together take at most `timeout` seconds.

    If `public_only` is true, connect only to an address of the public internet.

    Redirects are not followed: a signed alert is sent only to the channel's URL. Raise Refused if the status of the
    answer is not 200 to 299. Raise OSError, http.client.HTTPException or ValueError if there is no answer.
    """
    with Connection(url, timeout, public_only=public_only) as connection:
        answer = connection.post(content, fields, body=False)
    if not 200 <= answer.status < 300:
        raise Refused(answer)
