"""The billing systems: how Stripe, Lago and OpenMeter are asked and answer, and which of them RATELIMITS["PUSH"] has.

- Stripe: a request has one meter event. https://docs.stripe.com/api/billing/meter-event/create
- Lago: a request has several events; all or none are accepted. https://docs.getlago.com/api-reference/events/batch
- OpenMeter: a request has one or more CloudEvents, each known by its `source` and `id`. https://openmeter.io/docs/api
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from typing import Any
from urllib.parse import urlencode

from django.utils.module_loading import import_string

from ratelimits.billing.reports.exports.billing import LAGO_BATCH, STRIPE_MAX_AGE, lago_event, stripe_event
from ratelimits.billing.reports.exports.cloudevents import event, source
from ratelimits.billing.reports.exports.json import text
from ratelimits.billing.reports.rows import Row
from ratelimits.conf import conf
from ratelimits.usage.posting import HttpAnswer

#: Maximum pause in seconds, even if the receiver's Retry-After is longer.
MAX_WAIT = 86_400.0
#: Maximum lengths of two columns: the note of a delivery, and the last error of a receiver.
MAX_NOTE, MAX_ERROR = 400, 300
#: HTTP statuses that refuse a request because of the request's content.
_CONTENT_REFUSED = frozenset({400, 402, 404, 413, 422})
#: After an answer with one of these HTTP statuses, nobody knows whether the request was accepted. The same is true for
#: all statuses of 500 or more.
_OUTCOME_UNKNOWN = frozenset({408, 409, 425})
#: Start of Stripe's error message for an event with an `identifier` that Stripe has already. This error has no code.
_STRIPE_DUPLICATE = "An event already exists with identifier"
#: Lago's error for an event with a `transaction_id` that Lago has already.
_LAGO_DUPLICATE = {"transaction_id": ["value_already_exist"]}
#: The last retry must be sent at least this long before the receiver forgets the event of the first request, because
#: clocks differ and requests take time.
MARGIN = timedelta(hours=1)


class PushFailed(Exception):
    """Raised if a request failed. The caller then pauses the receiver.

    `after` is the receiver's Retry-After in seconds, if the receiver sent one. `suspect` is true if the content of the
    request is perhaps the cause.
    """

    def __init__(self, reason: str, after: float | None = None, *, suspect: bool = True) -> None:
        super().__init__(reason)
        self.after = None if after is None else min(after, MAX_WAIT)
        self.suspect = suspect


class NoneAccepted(PushFailed):
    """Raised if a request failed and the receiver accepted none of its events."""


class OutcomeUnknown(PushFailed):
    """Raised if a request failed and nobody knows whether the receiver accepted its events."""


@dataclass(frozen=True, slots=True)
class PushOutcome:
    """The outcome of a request for each of its events.

    Events that are neither in `accepted` nor in `refused` were not accepted, but can be sent again.
    """

    #: A note for each accepted event. The keys are the identities of the events.
    accepted: Mapping[str, str] = field(default_factory=dict)
    #: A note for each refused event. Refused events are not sent again.
    refused: Mapping[str, str] = field(default_factory=dict)
    #: Why the events that are neither in `accepted` nor in `refused` were not accepted.
    reason: str = ""


class Service(ABC):
    """A kind of billing system."""

    name: str
    label: str
    #: The default URL of the service. The settings can give another URL.
    url: str
    #: The path that is added to the URL.
    path: str
    #: Maximum number of events in one request.
    max_events: int
    #: Maximum age of an event that the service accepts; None means any age.
    max_age: timedelta | None = None
    #: For how many hours the service recognises an event that is sent again; None means for ever.
    remembers: float | None = None
    #: Whether requests need an API key.
    needs_key = True
    #: Whether the setting BILLING_CUSTOMER says which customer of this service belongs to an account.
    uses_billing_customer = True

    @abstractmethod
    def event(self, row: Row, customer: str) -> str:
        """Return the event for a line of a final report as JSON; "" if the line has nothing to bill."""

    @abstractmethod
    def request(self, events: Sequence[str], key: str) -> tuple[bytes, dict[str, str]]:
        """Return the body and the headers of a request with these events."""

    @abstractmethod
    def accepted(self, answer: HttpAnswer, event_ids: Sequence[str]) -> bool:
        """Return whether an answer with a status of 200 to 299 shows that the service accepted these events."""

    @abstractmethod
    def refused(self, answer: HttpAnswer, event_ids: Sequence[str]) -> PushOutcome | None:
        """Return the outcome that an error answer describes; None if the answer is not from this service."""

    def outcome(self, answer: HttpAnswer, event_ids: Sequence[str]) -> PushOutcome:
        """Return the outcome of a request with these events.

        Raise NoneAccepted if no event was accepted, and OutcomeUnknown if nobody knows whether events were accepted.
        """
        status = answer.status
        if 200 <= status < 300:
            if self.accepted(answer, event_ids):
                return PushOutcome(accepted=dict.fromkeys(event_ids, answer.summary))
            raise OutcomeUnknown(f"{answer.summary}, but the answer is not from {self.label}: is the URL right?")
        if status == 429:
            raise NoneAccepted(answer.summary, answer.retry_after(), suspect=False)
        if status in _OUTCOME_UNKNOWN or status >= 500:
            raise OutcomeUnknown(answer.summary, answer.retry_after())
        refusal = self.refused(answer, event_ids) if status in _CONTENT_REFUSED else None
        if refusal is None:
            raise NoneAccepted(f"{answer.summary}: are URL and KEY right?", answer.retry_after())
        # If the service does not say which event was wrong, and there was only one event, this event was wrong.
        if not (refusal.accepted or refusal.refused) and len(event_ids) == 1:
            return PushOutcome(refused={event_ids[0]: refusal.reason})
        return refusal


def read_json(answer: HttpAnswer) -> Any:
    """Return the body of an answer, decoded from JSON; None if it is not JSON."""
    try:
        return json.loads(answer.body)
    except ValueError:
        return None


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
        if message.startswith(_STRIPE_DUPLICATE) and event_id in message:
            return PushOutcome(accepted={event_id: "Stripe had the event already"})
        return PushOutcome(refused={event_id: f"{answer.summary}: {code} {message}"})


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
            if error == _LAGO_DUPLICATE:
                accepted[event_ids[int(index)]] = "Lago had the event already"
            else:
                refused[event_ids[int(index)]] = f"{answer.summary}: {json.dumps(error)}"
        reason = json.dumps(details) if details else str(content["error"])
        return PushOutcome(accepted, refused, f"{answer.summary}: {reason}")


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


#: The kinds of billing systems, by name.
SERVICES: dict[str, Service] = {service.name: service for service in (Stripe(), Lago(), OpenMeter())}


@dataclass(frozen=True)
class Receiver:
    """A billing system that receives events, with its options in the settings."""

    name: str
    service: Service
    #: The API key; "" if the billing system needs none.
    key: str
    #: The URL to which requests are sent.
    url: str
    #: The first month, such as "2026-11", whose reports are sent.
    since: str
    #: Returns the customer for an account; None or "" if the billing system does not bill the account.
    customer: Callable[[str], str | None]
    #: How long the billing system recognises a repeated event; None means for ever.
    remembers: timedelta | None

    @property
    def retried_for(self) -> timedelta | None:
        """Return for how long a request whose answer was lost is sent again; None means for ever."""
        return None if self.remembers is None else max(self.remembers - MARGIN, timedelta())


def receivers() -> list[Receiver]:
    """Return the billing systems, in the order of the settings."""
    return [_receiver(name, options) for name, options in conf.PUSH.items()]


def receiver(name: str) -> Receiver:
    """Return the billing system with this name. Raise KeyError if the settings do not list it."""
    return _receiver(name, conf.PUSH[name])


def _receiver(name: str, options: dict[str, object]) -> Receiver:
    service = SERVICES[str(options.get("FORMAT", name))]
    customer: object = options.get("CUSTOMER")
    if customer is None:
        customer = conf.BILLING_CUSTOMER if service.uses_billing_customer else None
    if isinstance(customer, str):
        customer = import_string(customer)
    # Without a function, the customer has the name of the account.
    customer_of = customer if callable(customer) else str
    hours = options.get("REMEMBERS", service.remembers)
    return Receiver(
        name=name,
        service=service,
        key=str(options.get("KEY", "")),
        url=str(options.get("URL", service.url)).rstrip("/") + service.path,
        since=str(options["SINCE"]),
        customer=lru_cache(maxsize=4096)(customer_of),
        remembers=None if hours is None else timedelta(hours=float(str(hours))),
    )
