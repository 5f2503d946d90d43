"""Decision to HTTP: the RateLimit fields and the problem document of a refusal.

After draft-ietf-httpapi-ratelimit-headers-10, which still moves: this module alone writes its syntax (RFC 9651).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

from ratelimits.algorithms.limits import Algorithm
from ratelimits.algorithms.parsing import MICROSECONDS

#: The draft's problem type for a refusal by quota.
QUOTA_EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded"


class Policy(NamedTuple):
    """A limit as a client is told of it: name, quota in permits, and window in seconds (None: no window)."""

    name: str
    quota: int
    window: int | None


def policy(name: str, algorithm: Algorithm) -> Policy:
    """The policy of a rule. A window is the time in which the whole quota comes back, rounded up to seconds.

    A quota of nothing has none: no time brings anything back.
    """
    quota, micros = algorithm.quota
    return Policy(name, quota, None if micros is None or not quota else max(ceil(micros / MICROSECONDS), 1))


def quoted(value: str) -> str:
    """Text as a String of RFC 9651."""
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def policies(all_policies: Sequence[Policy]) -> str:
    """The RateLimit-Policy field."""
    return ", ".join(
        f"{quoted(one.name)};q={one.quota}" + (f";w={one.window}" if one.window is not None else "")
        for one in all_policies
    )


def standing(name: str, remaining: int, reset: float | None) -> str:
    """The RateLimit field: the policy that binds, `quoted`, the permits left, and seconds until more (None: never)."""
    if reset is None:
        return f"{name};r={remaining}"
    return f"{name};r={remaining};t={ceil(reset)}"


def retry_after(seconds: float) -> str:
    """The Retry-After field in whole seconds, rounded up like the RateLimit field's `t`, so never earlier than that."""
    return str(max(ceil(seconds), 1))


def legacy(limit: float, remaining: int, reset: float | None) -> dict[str, str]:
    """The X-RateLimit fields that many clients know; the reset is in seconds from now, left out if there is none."""
    fields = {"X-RateLimit-Limit": str(limit), "X-RateLimit-Remaining": str(remaining)}
    if reset is not None:
        fields["X-RateLimit-Reset"] = str(ceil(reset))
    return fields


def unavailable() -> dict[str, Any]:
    """The body of a refusal because no decision could be had."""
    return {"title": "The quota of this request cannot be checked now", "status": 503}


def problem(violated: Sequence[str], seconds: float | None) -> dict[str, Any]:
    """The body of a refusal as application/problem+json (RFC 9457); `seconds` until it would pass, None: never."""
    detail = (
        "This request can never be admitted." if seconds is None else f"Try again in {max(ceil(seconds), 1)} seconds."
    )
    return {
        "type": QUOTA_EXCEEDED,
        "title": "Request cannot be satisfied as assigned quota has been exceeded",
        "status": 429,
        "detail": detail,
        "violated-policies": list(violated),
    }
