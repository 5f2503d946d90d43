"""Lago, a billing system: it receives batches of events, and accepts a batch as a whole or not at all.

See https://docs.getlago.com/api-reference/events/batch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from ratelimits.posting import HttpAnswer
from ratelimits.push.service import PushOutcome, Service, read_json
from ratelimits.reports.exports.billing import LAGO_BATCH, lago_event
from ratelimits.reports.rows import Row

#: Lago's error for an event if it has the event's transaction_id already.
_KNOWN = {"transaction_id": ["value_already_exist"]}


class Lago(Service):
    """Lago events with all quantities of a line. Lago never forgets a transaction_id."""

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

    def accepted(self, answer: HttpAnswer, names: Sequence[str]) -> bool:
        content = read_json(answer)
        events = content.get("events") if isinstance(content, dict) else None
        if not isinstance(events, list):
            return False
        return set(names) <= {event.get("transaction_id") for event in events if isinstance(event, dict)}

    def refused(self, answer: HttpAnswer, names: Sequence[str]) -> PushOutcome | None:
        """Read a refusal. It names events by their index in the batch."""
        content = read_json(answer)
        if not isinstance(content, dict) or "status" not in content or "error" not in content:
            return None
        if answer.status == 404 and not content.get("code"):
            return None  # The URL is wrong.
        details = content.get("error_details")
        accepted, refused = {}, {}
        for index, error in details.items() if isinstance(details, dict) else ():
            if not (index.isascii() and index.isdecimal() and int(index) < len(names)):
                continue
            if error == _KNOWN:
                accepted[names[int(index)]] = "Lago had the event already"
            else:
                refused[names[int(index)]] = f"{answer.summary}: {json.dumps(error)}"
        reason = json.dumps(details) if details else str(content["error"])
        return PushOutcome(accepted, refused, f"{answer.summary}: {reason}")
