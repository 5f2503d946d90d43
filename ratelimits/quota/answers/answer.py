"""The answer to a request, and its header fields for the client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ratelimits.engine import Decision
from ratelimits.quota import headers
from ratelimits.quota.answers.caching import NEVER
from ratelimits.quota.prepared import Prepared
from ratelimits.rules import AccessRow, AppliedRule

#: The default cost of a request, as a mapping and as a tuple of pairs (meter, cost).
ONE_REQUEST: Mapping[str, int] = {"requests": 1}
ONE_ITEM = tuple(ONE_REQUEST.items())


class Answer(NamedTuple):
    """The answer to a request.

    allowed      whether the request may proceed
    decision     the engine's decision; None if a failure policy, a block or an allow answered
    prepared     the rules that apply; None if they were not needed (such as for a block) or could not be read
    retry_after  seconds until the same request would be admitted; None if it would never be admitted
    wait         seconds that the caller must wait before the request proceeds
    unavailable  true if there was no decision, and a failure policy refused the request without counting it
    access       the block that refused the request, or the allow that exempted it; None if rules decided
    """

    allowed: bool
    decision: Decision | None = None
    prepared: Prepared | None = None
    retry_after: float | None = 0.0
    wait: float = 0.0
    unavailable: bool = False
    access: AccessRow | None = None

    @property
    def binding(self) -> AppliedRule | None:
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
