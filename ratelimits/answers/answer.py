"""The answer to a request, and its header fields for the client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ratelimits.answers import headers
from ratelimits.answers.headers import NEVER
from ratelimits.engine import Decision


class AnswerRule(Protocol):
    """A rule, as far as answers show it. Its refusals have the status `refusal_status` and the text `refusal_text`."""

    @property
    def name(self) -> str: ...
    @property
    def refusal_status(self) -> int: ...
    @property
    def refusal_text(self) -> str: ...


class AnswerRules(Protocol):
    """The rules of a request, as far as answers show them: `quota.prepared.Prepared` explains each attribute."""

    @property
    def rules(self) -> Sequence[AnswerRule]: ...
    @property
    def leases(self) -> bool: ...
    @property
    def policies(self) -> str: ...
    @property
    def quoted(self) -> Sequence[str]: ...
    @property
    def shows_shadow(self) -> bool: ...
    @property
    def has_own_refusals(self) -> bool: ...


class AnswerAccess(Protocol):
    """A block or an allow, as far as answers show it. A block refuses with this status and this message."""

    @property
    def status(self) -> int: ...
    @property
    def message(self) -> str: ...


class Answer(NamedTuple):
    """The answer to a request.

    allowed      whether the request may proceed
    decision     the engine's decision; None if a failure policy, a block or an allow answered
    prepared     the rules that apply; None if they were not needed (such as for a block or for rates in code) or could
                 not be read
    retry_after  seconds until the same request would be admitted; None if it would never be admitted
    wait         seconds that the caller must wait before the request proceeds
    unavailable  true if there was no decision, and a failure policy refused the request without counting it
    access       the block that refused the request, or the allow that exempted it; None if rules decided
    """

    allowed: bool
    decision: Decision | None = None
    prepared: AnswerRules | None = None
    retry_after: float | None = 0.0
    wait: float = 0.0
    unavailable: bool = False
    access: AnswerAccess | None = None

    @property
    def binding(self) -> AnswerRule | None:
        """Return the rule of the binding limit, or None."""
        binding = self.decision.binding if self.decision is not None else None
        return self.prepared.rules[binding] if self.prepared is not None and binding is not None else None

    def headers(self) -> dict[str, str]:
        """Return the RateLimit fields of the response, and after a refusal also Retry-After and Cache-Control."""
        allowed, decision, prepared, retry_after, _wait, _unavailable, _access = self
        fields: dict[str, str] = {}
        if decision is not None and prepared is not None:
            if allowed and prepared.shows_shadow:
                fields = headers.fields_with_shadow(decision, prepared.policies, prepared.quoted)
            elif position := decision.reply[2]:  # the position of the binding limit, from 1; 0 if there is none
                name = prepared.quoted[position - 1]
                fields = headers.fields(decision, prepared.policies, name, allowed=allowed, retry_after=retry_after)
        if not allowed and retry_after is not None:
            fields["Retry-After"] = headers.retry_after(retry_after)
        if not allowed:
            fields["Cache-Control"] = NEVER
        return fields


#: The answer to every request if the setting ENABLED is False.
PASSED = Answer(True)
