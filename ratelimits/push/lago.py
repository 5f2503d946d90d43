"""Events for the billing system Lago: an HTTP request has several events, and Lago accepts all of them or none.

See https://docs.getlago.com/api-reference/events/batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ratelimits.posting import HttpAnswer
from ratelimits.push.service import PushOutcome, Service, read_json
from ratelimits.reports.exports.billing import LAGO_BATCH, lago_event
from ratelimits.reports.rows import Row

#: Lago's error for an event with a `transaction_id` that Lago has already.
_DUPLICATE_ERROR = {"transaction_id": ["value_already_exist"]}


class Lago(Service):
    """Send all quantities of a report line to Lago. Lago never forgets a `transaction_id`."""

    name, label = "lago", "Lago"
    url, path = "https://api.getlago.com", "/api/v1/events/batch"
    max_events = LAGO_BATCH

    def event(self, row: Row, customer: str) -> str:
        return lago_event(row, customer)

    def request(self, events: Sequence[str], key: str) -> tuple[bytes, dict[str, str]]:
        content = f'{{"events":[{",".join(events)}]}}'.encode()
        return content, {
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/json",
            "User-Agent": "ratelimits",
        }

    def accepted(self, answer: HttpAnswer, event_ids: Sequence[str]) -> bool:
        content = read_json(answer)
        events = content.get("events") if isinstance(content, dict) else None
        if not isinstance(events, list):
            return False
        return set(event_ids) <= {event.get("transaction_id") for event in events if isinstance(event, dict)}

    def refused(self, answer: HttpAnswer, event_ids: Sequence[str]) -> PushOutcome | None:
        """Read a refusal. `error_details` has the error of each wrong event, by the event's index in the request."""
        content = read_json(answer)
        if not isinstance(content, dict) or "status" not in content or "error" not in content:
            return None
        # Lago's own 404 has a code. A 404 without a code comes from another server: the URL is wrong.
        if answer.status == 404 and not content.get("code"):
            return None
        details = content.get("error_details")
        accepted, refused = {}, {}
        for index, error in details.items() if isinstance(details, dict) else ():
            if not (index.isascii() and index.isdecimal() and int(index) < len(event_ids)):
                continue  # This is not the index of an event.
            if error == _DUPLICATE_ERROR:
                accepted[event_ids[int(index)]] = "Lago had the event already"
            else:
                refused[event_ids[int(index)]] = f"{answer.summary}: {json.dumps(error)}"
        reason = json.dumps(details) if details else str(content["error"])
        return PushOutcome(accepted, refused, f"{answer.summary}: {reason}")
