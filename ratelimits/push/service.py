"""The base class of all kinds of billing systems. Its subclasses make requests and read answers."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ratelimits.posting import HttpAnswer
from ratelimits.reports.rows import Row

#: Maximum pause in seconds, even if the receiver's Retry-After is longer.
MAX_WAIT = 86_400.0
#: Maximum lengths of two columns: the note of a delivery, and the last error of a receiver.
MAX_NOTE, MAX_ERROR = 400, 300
#: HTTP statuses that refuse a request because of the request's content.
_CONTENT_REFUSED = frozenset({400, 402, 404, 413, 422})
#: After an answer with one of these HTTP statuses, nobody knows whether the request was accepted. The same is true for
#: all statuses of 500 or more.
_OUTCOME_UNKNOWN = frozenset({408, 409, 425})


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
