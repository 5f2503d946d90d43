"""Send alerts as webhooks that are signed as the standard https://www.standardwebhooks.com says.

There are libraries for this standard, so a receiver can check the signatures easily.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from base64 import b64encode
from http import HTTPStatus
from uuid import UUID

from ratelimits.models import Alert
from ratelimits.models.alerts import secret_key
from ratelimits.posting import Connection, HttpAnswer
from ratelimits.reports.periods import SECOND, iso

#: The type of these webhooks.
TYPE = "ratelimits.threshold_reached"


class Refused(Exception):
    """Raised if the receiver answers with an error.

    `final` is true for the status 410: the receiver will never accept webhooks again.
    """

    def __init__(self, answer: HttpAnswer) -> None:
        super().__init__(answer.summary)
        self.final = answer.status == HTTPStatus.GONE


def body(alert: Alert) -> bytes:
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
    return json.dumps({"type": TYPE, "timestamp": timestamp, "data": data}, ensure_ascii=False).encode()


def signature(secret: str, webhook_id: str, timestamp: int, content: bytes) -> str:
    """Return the signature of a webhook: the HMAC-SHA256 of its id, its timestamp (s since 1970 UTC) and its body.

    The prefix "v1" is the name of this method in Standard Webhooks.
    """
    digest = hmac.digest(secret_key(secret), f"{webhook_id}.{timestamp}.".encode() + content, hashlib.sha256)
    return f"v1,{b64encode(digest).decode()}"


def headers(secret: str, webhook_id: UUID, timestamp: int, content: bytes) -> dict[str, str]:
    """Return the headers of one attempt. Every attempt has the same id, but its own timestamp and signature."""
    return {
        "Content-Type": "application/json",
        "User-Agent": "ratelimits",
        "webhook-id": str(webhook_id),
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(secret, str(webhook_id), timestamp, content),
        "Idempotency-Key": str(webhook_id),
    }


def post(url: str, content: bytes, fields: dict[str, str], timeout: float, *, public_only: bool = False) -> None:
    """Send the content by POST to a URL. All steps together take at most `timeout` seconds.

    If `public_only` is true, connect only to an address of the public internet.

    Redirects are not followed: a signed alert is sent only to the channel's URL. Raise Refused if the status of the
    answer is not 200 to 299. Raise OSError, http.client.HTTPException or ValueError if there is no answer.
    """
    with Connection(url, timeout, public_only=public_only) as connection:
        answer = connection.post(content, fields, body=False)
    if not 200 <= answer.status < 300:
        raise Refused(answer)
