"""Lago: batches of events, taken as a whole or not at all (https://docs.getlago.com/api-reference/events/batch)."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ratelimits.posting import HttpAnswer
from ratelimits.push.service import PushOutcome, Service, read_json
from ratelimits.reports.exports.billing import LAGO_BATCH, lago_event
from ratelimits.reports.rows import Row

#: What a refusal says of an event whose transaction_id it has.
_KNOWN = {"transaction_id": ["value_already_exist"]}


class Lago(Service):
    """Events with all quantities of a line; Lago knows a transaction_id for ever."""

    name, label = "lago", "Lago"
    url, path = "https://api.getlago.com", "/api/v1/events/batch"
    together = LAGO_BATCH

    def event(self, row: Row, customer: str) -> str:
        return lago_event(row, customer)

    def request(self, events: Sequence[str], key: str) -> tuple[bytes, dict[str, str]]:
        content = f'{{"events":[{",".join(events)}]}}'.encode()
        return content, {
            "Authorization": f"Bearer {key}",
            "Content-Type": "application/json",
            "User-Agent": "ratelimits",
        }

    def taken(self, answer: HttpAnswer, names: Sequence[str]) -> bool:
        found = read_json(answer)
        events = found.get("events") if isinstance(found, dict) else None
        if not isinstance(events, list):
            return False
        return set(names) <= {event.get("transaction_id") for event in events if isinstance(event, dict)}

    def refused(self, answer: HttpAnswer, names: Sequence[str]) -> PushOutcome | None:
        """Read a refusal, which names events by their place in the batch."""
        found = read_json(answer)
        if not isinstance(found, dict) or "status" not in found or "error" not in found:
            return None
        if answer.status == 404 and not found.get("code"):
            return None  # the address
        details = found.get("error_details")
        accepted, refused = {}, {}
        for place, wrong in details.items() if isinstance(details, dict) else ():
            if not (place.isascii() and place.isdecimal() and int(place) < len(names)):
                continue
            if wrong == _KNOWN:
                accepted[names[int(place)]] = "it had it already"
            else:
                refused[names[int(place)]] = f"{answer.says}: {json.dumps(wrong)}"
        said = json.dumps(details) if details else str(found["error"])
        return PushOutcome(accepted, refused, f"{answer.says}: {said}")
