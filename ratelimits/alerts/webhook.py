"""Signed webhooks, after Standard Webhooks (https://www.standardwebhooks.com): its libraries verify them."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import socket
import ssl
from base64 import b64encode
from typing import Any, cast
from urllib.parse import urlsplit
from uuid import UUID

from ratelimits.alerts.deadline import Deadline, Reading
from ratelimits.models import Alert
from ratelimits.models.alerts import secret_key
from ratelimits.reports.periods import SECOND, iso

TYPE = "ratelimits.threshold_reached"


class Refused(Exception):
    """The receiver answered, but did not take it. `final`: it said that it never will."""

    def __init__(self, status: int) -> None:
        super().__init__(f"it answered {status} {http.client.responses.get(status, '')}".strip())
        self.final = status == http.client.GONE


def body(alert: Alert) -> bytes:
    """What is sent, in JSON: the same bytes every time."""
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


def signature(secret: str, name: str, timestamp: int, content: bytes) -> str:
    """The signature of a webhook: HMAC-SHA256 over its id, the seconds since 1970 UTC and its body."""
    signed = hmac.digest(secret_key(secret), f"{name}.{timestamp}.".encode() + content, hashlib.sha256)
    return f"v1,{b64encode(signed).decode()}"


def headers(secret: str, name: UUID, timestamp: int, content: bytes) -> dict[str, str]:
    """The headers of one attempt; the id stays from attempt to attempt, the time and so the signature do not."""
    return {
        "Content-Type": "application/json",
        "User-Agent": "ratelimits",
        "webhook-id": str(name),
        "webhook-timestamp": str(timestamp),
        "webhook-signature": signature(secret, str(name), timestamp, content),
        "Idempotency-Key": str(name),
    }


def post(url: str, content: bytes, fields: dict[str, str], timeout: float) -> None:
    """POST to an address and return when it was taken; the whole exchange lasts at most `timeout` seconds.

    Looking up the host's name comes on top: the system's resolver has limits of its own. Redirects are not followed:
    what is signed goes where the channel says. Raises Refused for any answer but 2xx; OSError,
    http.client.HTTPException or ValueError when there is none.
    """
    parts = urlsplit(url)
    if parts.hostname is None:
        raise ValueError(f"{url!r} is no address")
    context = ssl.create_default_context() if parts.scheme == "https" else None
    connection: http.client.HTTPConnection
    if context is not None:
        connection = http.client.HTTPSConnection(parts.hostname, parts.port, context=context)
    else:
        connection = http.client.HTTPConnection(parts.hostname, parts.port)
    found = socket.getaddrinfo(connection.host, connection.port, type=socket.SOCK_STREAM)
    deadline = Deadline(timeout)
    try:
        connection.sock = _connected(found, deadline)
        if context is not None:
            connection.sock.settimeout(deadline.left())
            connection.sock = context.wrap_socket(connection.sock, server_hostname=parts.hostname)
        connection.sock.settimeout(deadline.left())
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        connection.request("POST", path, content, fields)
        response = http.client.HTTPResponse(cast("socket.socket", Reading(connection.sock, deadline)), method="POST")
        response.begin()
        status = response.status
    finally:
        connection.close()
    if not 200 <= status < 300:
        raise Refused(status)


def _connected(found: list[Any], deadline: Deadline) -> socket.socket:
    """A connection to the first of these addresses that answers. Raises OSError if none does."""
    failure = OSError("there is no address")
    for family, kind, protocol, _name, address in found:
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(deadline.left())
            sock.connect(address)
        except OSError as error:
            sock.close()
            failure = error
        else:
            return sock
    raise failure
