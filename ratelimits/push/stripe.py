"""Stripe: one meter event a request (https://docs.stripe.com/api/billing/meter-event/create)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from urllib.parse import urlencode

from ratelimits.posting import HttpAnswer
from ratelimits.push.service import PushOutcome, Service, read_json
from ratelimits.reports.exports.billing import STRIPE_OLDEST, stripe_event
from ratelimits.reports.rows import Row

#: How Stripe refuses an identifier that it has; the error has no code.
_KNOWN = "An event already exists with identifier"


class Stripe(Service):
    """Meter events of what goes beyond the plan.

    There is no Idempotency-Key: Stripe would repeat the first answer for a day, an internal error too. What makes a
    retry harmless is the event's own identifier.
    """

    name, label = "stripe", "Stripe"
    url, path = "https://api.stripe.com", "/v1/billing/meter_events"
    together = 1
    oldest = timedelta(microseconds=STRIPE_OLDEST)
    remembers = 24

    def event(self, row: Row, customer: str) -> str:
        return stripe_event(row, customer)

    def request(self, events: Sequence[str], key: str) -> tuple[bytes, dict[str, str]]:
        (text,) = events
        event = json.loads(text)
        payload = {f"payload[{name}]": value for name, value in event.pop("payload").items()}
        content = urlencode({**event, **payload}).encode()
        return content, {
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/x-www-form-urlencoded",
            "User-Agent": "ratelimits",
        }

    def taken(self, answer: HttpAnswer, names: Sequence[str]) -> bool:
        found = read_json(answer)
        return isinstance(found, dict) and found.get("identifier") == names[0]

    def refused(self, answer: HttpAnswer, names: Sequence[str]) -> PushOutcome | None:
        found = read_json(answer)
        error = found.get("error") if isinstance(found, dict) else None
        if not isinstance(error, dict):
            return None
        message, code = str(error.get("message", "")), str(error.get("code") or "")
        if answer.status == 404 and code != "resource_missing":
            return None  # the address
        if message.startswith(_KNOWN) and names[0] in message:
            return PushOutcome(accepted={names[0]: "it had it already"})
        return PushOutcome(refused={names[0]: f"{answer.says}: {code} {message}"})
