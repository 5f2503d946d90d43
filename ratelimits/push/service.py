"""The base class of billing systems: it makes the requests and reads the answers."""

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
#: HTTP statuses of an answer that refuses a request because of its content.
_ABOUT_CONTENT = frozenset({400, 402, 404, 413, 422})
#: HTTP statuses that do not say whether the request was accepted. All statuses from 500 up do not say it either.
_UNCLEAR = frozenset({408, 409, 425})


class PushFailed(Exception):
    """A request failed, and the receiver is paused.

    `after` is the receiver's Retry-After in seconds, if it sent one. `suspect` says whether the content of the request
    may be the cause.
    """

    def __init__(self, reason: str, after: float | None = None, *, suspect: bool = True) -> None:
        super().__init__(reason)
        self.after = None if after is None else min(after, MAX_WAIT)
        self.suspect = suspect


class NoneAccepted(PushFailed):
    """No event of the request was accepted."""


class OutcomeUnknown(PushFailed):
    """The request may have been accepted or not."""


@dataclass(frozen=True, slots=True)
class PushOutcome:
    """The outcome of a request: a note for each event that was accepted or finally refused, by the event's identity.

    Events that are in neither mapping were not accepted, but can be sent again.
    """

    accepted: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    #: Why the other events were not accepted.
    reason: str = ""


class Service(ABC):
    """A kind of billing system."""

    name: str
    label: str
    #: The URL that is used if the settings name none, and the path that is added to the URL.
    url: str
    path: str
    #: Maximum number of events in one request.
    max_events: int
    #: Maximum age of an event; None for any age.
    oldest: timedelta | None = None
    #: For how many hours it recognises an event that is sent again; None for ever.
    remembers: float | None = None
    #: Whether requests need an API key, and whether the setting BILLING_CUSTOMER names its customers.
    needs_key = True
    uses_billing_customer = True

    @abstractmethod
    def event(self, row: Row, customer: str) -> str:
        """Return the event of a final line as JSON; "" if there is nothing to bill."""

    @abstractmethod
    def request(self, events: Sequence[str], key: str) -> tuple[bytes, dict[str, str]]:
        """Return the body and the headers of a request with these events."""

    @abstractmethod
    def accepted(self, answer: HttpAnswer, names: Sequence[str]) -> bool:
        """Return whether an answer with a status of 200 to 299 says that the service has accepted these events."""

    @abstractmethod
    def refused(self, answer: HttpAnswer, names: Sequence[str]) -> PushOutcome | None:
        """Return the outcome that an error answer describes; None if it is not an error answer of this service."""

    def outcome(self, answer: HttpAnswer, names: Sequence[str]) -> PushOutcome:
        """Return the outcome for the events with the identities `names`.

        Raises NoneAccepted if no event was accepted, and OutcomeUnknown if the answer does not say.
        """
        status = answer.status
        if 200 <= status < 300:
            if self.accepted(answer, names):
                return PushOutcome(accepted=dict.fromkeys(names, answer.summary))
            raise OutcomeUnknown(f"{answer.summary}, but the answer is not from {self.label}: is the URL right?")
        if status == 429:
            raise NoneAccepted(answer.summary, answer.retry_after(), suspect=False)
        if status in _UNCLEAR or status >= 500:
            raise OutcomeUnknown(answer.summary, answer.retry_after())
        refusal = self.refused(answer, names) if status in _ABOUT_CONTENT else None
        if refusal is None:
            raise NoneAccepted(f"{answer.summary}: are URL and KEY right?", answer.retry_after())
        if not (refusal.accepted or refusal.refused) and len(names) == 1:
            return PushOutcome(refused={names[0]: refusal.reason})
        return refusal


def read_json(answer: HttpAnswer) -> Any:
    """Return the body of an answer, decoded from JSON; None if it is not JSON."""
    try:
        return json.loads(answer.body)
    except ValueError:
        return None
