"""A kind of billing system: what it is sent, and what its answers mean."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from ratelimits.posting import HttpAnswer
from ratelimits.reports.rows import Row

#: A receiver is not asked to wait for longer than this, in seconds, whatever its Retry-After says.
LONGEST_WAIT = 86_400.0
#: Statuses of a request that was read and not taken, for what is in it.
_ABOUT_CONTENT = frozenset({400, 402, 404, 413, 422})
#: Statuses that say nothing of whether the request was taken; so do all from 500 up.
_UNCLEAR = frozenset({408, 409, 425})


class Held(Exception):
    """Nothing can be sent now.

    `after`: seconds until the receiver wants to be asked again, if it said so. `suspect`: whether it may be for what is
    in this request that it failed.
    """

    def __init__(self, reason: str, after: float | None = None, *, suspect: bool = True) -> None:
        super().__init__(reason)
        self.after = None if after is None else min(after, LONGEST_WAIT)
        self.suspect = suspect


class NotTaken(Held):
    """No event of the request was taken."""


class Unclear(Held):
    """Nobody here knows whether the request was taken."""


@dataclass(frozen=True, slots=True)
class PushOutcome:
    """What became of the events of a request, by their identities; those that are not named were not taken."""

    accepted: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    #: Why events that are not named were not taken.
    reason: str = ""


class Service(ABC):
    """A kind of billing system."""

    name: str
    label: str
    #: Where it is, unless URL says otherwise, and the path behind that.
    url: str
    path: str
    #: How many events one request takes.
    together: int
    #: How old an event may be; None: as old as you like.
    oldest: timedelta | None = None
    #: Hours in which it recognises an event that it was sent before; None: for ever.
    remembers: float | None = None
    #: Whether it cannot do without a key, and whether BILLING_CUSTOMER names its customers.
    needs_key = True
    asks_billing_customer = True

    @abstractmethod
    def event(self, row: Row, customer: str) -> str:
        """Return the event of a final line as JSON; "" if there is nothing to bill."""

    @abstractmethod
    def request(self, events: Sequence[str], key: str) -> tuple[bytes, dict[str, str]]:
        """Return the body and the headers of a request with these events."""

    @abstractmethod
    def taken(self, answer: HttpAnswer, names: Sequence[str]) -> bool:
        """Return whether this answer of 200 to 299 is what the service says when it has taken these events."""

    @abstractmethod
    def refused(self, answer: HttpAnswer, names: Sequence[str]) -> PushOutcome | None:
        """Return what the refusal of a request says of its events; None if it is none of this service."""

    def outcome(self, answer: HttpAnswer, names: Sequence[str]) -> PushOutcome:
        """Return what became of the events with these identities. Raises NotTaken and Unclear."""
        status = answer.status
        if 200 <= status < 300:
            if self.taken(answer, names):
                return PushOutcome(accepted=dict.fromkeys(names, answer.says))
            raise Unclear(f"{answer.says}, but not as {self.label} does: is the URL right?")
        if status == 429:
            raise NotTaken(answer.says, answer.retry_after(), suspect=False)
        if status in _UNCLEAR or status >= 500:
            raise Unclear(answer.says, answer.retry_after())
        found = self.refused(answer, names) if status in _ABOUT_CONTENT else None
        if found is None:
            raise NotTaken(f"{answer.says}: are URL and KEY right?", answer.retry_after())
        if not (found.accepted or found.refused) and len(names) == 1:
            return PushOutcome(refused={names[0]: found.reason})
        return found


def read_json(answer: HttpAnswer) -> Any:
    """Return what the body says in JSON; None if it is none."""
    try:
        return json.loads(answer.body)
    except ValueError:
        return None
