"""Events for the billing system Stripe: each request has one meter event.

See https://docs.stripe.com/api/billing/meter-event/create.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import timedelta
from urllib.parse import urlencode

from ratelimits.posting import HttpAnswer
from ratelimits.push.service import PushOutcome, Service, read_json
from ratelimits.reports.exports.billing import STRIPE_MAX_AGE, stripe_event
from ratelimits.reports.rows import Row

#: Start of Stripe's error message for an event with an `identifier` that Stripe has already. This error has no code.
_DUPLICATE_ERROR = "An event already exists with identifier"


class Stripe(Service):
    """Send the overage of a report line as a meter event.

    The header Idempotency-Key is not sent. With this header, Stripe would repeat its first answer for a day, even if
    this answer was an internal error. Retries are safe without the header, because Stripe recognises the event's
    `identifier`.
    """

    name, label = "stripe", "Stripe"
    url, path = "https://api.stripe.com", "/v1/billing/meter_events"
    max_events = 1
    max_age = timedelta(microseconds=STRIPE_MAX_AGE)
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

    def accepted(self, answer: HttpAnswer, event_ids: Sequence[str]) -> bool:
        content, (event_id,) = read_json(answer), event_ids
        return isinstance(content, dict) and content.get("identifier") == event_id

    def refused(self, answer: HttpAnswer, event_ids: Sequence[str]) -> PushOutcome | None:
        content, (event_id,) = read_json(answer), event_ids
        error = content.get("error") if isinstance(content, dict) else None
        if not isinstance(error, dict):
            return None
        message, code = str(error.get("message", "")), str(error.get("code") or "")
        # Stripe's own 404 has this code. A 404 without it comes from another server: the URL is wrong.
        if answer.status == 404 and code != "resource_missing":
            return None
        if message.startswith(_DUPLICATE_ERROR) and event_id in message:
            return PushOutcome(accepted={event_id: "Stripe had the event already"})
        return PushOutcome(refused={event_id: f"{answer.summary}: {code} {message}"})
