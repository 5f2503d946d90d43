"""Events for the billing system OpenMeter: each request has one or more CloudEvents.

OpenMeter identifies an event by its `source` and its `id`. See https://openmeter.io/docs/api.
"""

from __future__ import annotations

from collections.abc import Sequence

from ratelimits.posting import HttpAnswer
from ratelimits.push.service import PushOutcome, Service, read_json
from ratelimits.reports.exports.cloudevents import event, source
from ratelimits.reports.exports.json import text
from ratelimits.reports.rows import Row


class OpenMeter(Service):
    """Send each report line as a CloudEvent. The subject of the event is the customer; its data are the whole line.

    By default, a self-hosted OpenMeter recognises repeated events for 24 hours. If your server uses another number of
    hours, set the option REMEMBERS to this number.
    """

    name, label = "openmeter", "OpenMeter"
    url, path = "https://openmeter.cloud", "/api/v1/events"
    max_events = 100
    remembers = 24
    needs_key = False
    uses_billing_customer = False

    def event(self, row: Row, customer: str) -> str:
        quantities = row.consumed_quantity, row.included_quantity, row.overage_quantity, row.refunded_quantity
        return event(row, text(source()), customer) if any(quantities) else ""

    def request(self, events: Sequence[str], key: str) -> tuple[bytes, dict[str, str]]:
        fields = {"Content-Type": "application/cloudevents-batch+json", "User-Agent": "ratelimits"}
        if key:
            fields["Authorization"] = f"Bearer {key}"
        return f"[{','.join(events)}]".encode(), fields

    def accepted(self, answer: HttpAnswer, event_ids: Sequence[str]) -> bool:
        return answer.status in (202, 204)

    def refused(self, answer: HttpAnswer, event_ids: Sequence[str]) -> PushOutcome | None:
        """Read a refusal. A refusal is about the whole request, and does not say which event was wrong."""
        content = read_json(answer)
        # OpenMeter refuses no event with 404, so the URL is wrong.
        if answer.status == 404 or not isinstance(content, dict):
            return None
        return PushOutcome(reason=f"{answer.summary}: {content.get('detail') or content.get('title') or content}")
