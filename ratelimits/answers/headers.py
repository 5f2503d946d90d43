"""Write decisions as HTTP: the RateLimit fields, the problem document of a refusal, and what shared caches may keep.

The fields follow draft-ietf-httpapi-ratelimit-headers-10. The draft can still change, so only this module writes these
fields. Their syntax is defined in RFC 9651.

A shared cache, such as Varnish, a CDN or Django's cache middleware, may store a response and send it to other callers.
Varnish stores some statuses, such as 200, 404 and 410, even if the response says nothing about caches.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from http import HTTPStatus
from math import ceil
from typing import Any, NamedTuple
from urllib.parse import quote

from django.http.response import HttpResponseBase

from ratelimits.algorithms.base import MICROSECONDS
from ratelimits.algorithms.limits import Algorithm
from ratelimits.conf import conf
from ratelimits.engine.clock import clock
from ratelimits.engine.decision import Decision

#: The draft's problem type for a request that exceeds a quota.
QUOTA_EXCEEDED = "https://iana.org/assignments/http-problem-types#quota-exceeded"
#: Cache-Control of a refusal. Django's cache middleware obeys only "private", and other caches "no-store".
NEVER = "no-store, private"
#: The names of the fields that describe the limits of one caller.
_FIELDS = "RateLimit", "RateLimit-Policy", "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"
_PRIVATE = re.compile(r"\b(?:private|no-store)\b(?!=)", re.IGNORECASE)
#: The words with which a view says that all callers may share its response, and header fields for the caches of CDNs.
_SHARED = re.compile(r"\b(?:public|s-maxage)\b", re.IGNORECASE)
_FOR_SHARED_CACHES = "CDN-Cache-Control", "Surrogate-Control"


class Policy(NamedTuple):
    """A limit as clients see it: its name, its quota in permits, and its window in seconds.

    `window` is None if the limit has no window.
    """

    name: str
    quota: int
    window: int | None


def policy(name: str, algorithm: Algorithm) -> Policy:
    """Return the policy of a rule. The window is the time in which the whole quota comes back, rounded up to seconds.

    A quota of 0 has no window, because no permits come back.
    """
    quota, micros = algorithm.quota
    return Policy(name, quota, None if micros is None or not quota else max(ceil(micros / MICROSECONDS), 1))


#: A character that is not allowed in a String of RFC 9651.
_UNPRINTABLE = re.compile("[^ -~]")


def quoted(value: str) -> str:
    """Return a text as a String of RFC 9651. Characters that are not allowed there are percent-encoded."""
    value = _UNPRINTABLE.sub(lambda match: quote(match[0], errors="replace"), value)
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def policies(shown_policies: Sequence[Policy]) -> str:
    """Return the value of RateLimit-Policy, such as `"burst";q=100;w=60` (q: quota, w: window in seconds)."""
    return ", ".join(
        f"{quoted(shown.name)};q={shown.quota}" + (f";w={shown.window}" if shown.window is not None else "")
        for shown in shown_policies
    )


def ratelimit_field(name: str, remaining: int, reset: float | None) -> str:
    """Return the value of RateLimit for the binding limit, such as `"burst";r=5;t=1`.

    `name` is the quoted name of the limit. `remaining` is the number of permits left. `reset` is the number of seconds
    until there are more permits. If it is None, there will never be more permits.
    """
    if reset is None:
        return f"{name};r={remaining}"
    return f"{name};r={remaining};t={ceil(reset)}"


def retry_after(seconds: float) -> str:
    """Return the value of Retry-After in whole seconds, rounded up in the same way as `t` in the RateLimit field."""
    return str(max(ceil(seconds), 1))


def fields(
    decision: Decision, policy_field: str, name: str, *, allowed: bool, retry_after: float | None
) -> dict[str, str]:
    """Return the RateLimit fields for a decision, without Retry-After.

    `policy_field` is the value of RateLimit-Policy. `name` is the quoted name of the binding limit. `allowed` and
    `retry_after` (in seconds) are fields of the answer to the request.
    """
    reply = decision.reply
    if allowed and reply[3] and not conf.X_RATELIMIT_HEADERS:
        # This is the usual case, so it calls no properties. `reply[2]` is the position of the binding limit, from 1.
        # `reply[3]` is the permits left. From `reply[9]` on, each limit has three numbers. The third of them is
        # reset_after in µs.
        seconds = -(-reply[8 + 3 * reply[2]] // MICROSECONDS)  # rounded up
        return {"RateLimit-Policy": policy_field, "RateLimit": f"{name};r={reply[3]};t={seconds}"}
    reset: float | None
    remaining, reset = decision.remaining_and_reset
    if not allowed and retry_after is not None:
        reset = retry_after
    elif not remaining and decision.limit == 0:
        # A limit with capacity 0 never has permits.
        reset = None
    shown = {"RateLimit-Policy": policy_field, "RateLimit": ratelimit_field(name, remaining, reset)}
    return shown | x_ratelimit_fields(decision.limit or 0, remaining, reset) if conf.X_RATELIMIT_HEADERS else shown


def fields_with_shadow(decision: Decision, policy_field: str, names: Sequence[str]) -> dict[str, str]:
    """Return the RateLimit fields of an admitted request, as if its shadow rules were enforced.

    `names` are the quoted names of the limits. The fields show the limit with the fewest permits left. If some limits
    would refuse, only these limits are compared.
    """
    standings = decision.standings
    tightest = min(range(len(standings)), key=lambda index: (standings[index].allowed, standings[index].remaining))
    shown_standing, limit = standings[tightest], decision.program.terms[tightest].algorithm.shown_limit
    remaining = shown_standing.remaining
    reset = shown_standing.reset_after if remaining or limit != 0 else None
    shown = {"RateLimit-Policy": policy_field, "RateLimit": ratelimit_field(names[tightest], remaining, reset)}
    return shown | x_ratelimit_fields(limit, remaining, reset) if conf.X_RATELIMIT_HEADERS else shown


def x_ratelimit_fields(limit: float, remaining: int, reset: float | None) -> dict[str, str]:
    """Return the older X-RateLimit fields. `reset` is the number of seconds until the reset; None if there is no reset.

    With X_RATELIMIT_RESET = "epoch", X-RateLimit-Reset is the moment of the reset, in seconds since 1970. Otherwise
    X-RateLimit-Reset is `reset`, rounded up.
    """
    fields = {"X-RateLimit-Limit": str(limit), "X-RateLimit-Remaining": str(remaining)}
    if reset is not None:
        start = 0.0
        if conf.X_RATELIMIT_RESET == "epoch":
            # Tests can stop the clock of decisions.
            start = time.time() if clock.frozen is None else clock.now() / MICROSECONDS
        fields["X-RateLimit-Reset"] = str(ceil(start + reset))
    return fields


def unavailable() -> dict[str, Any]:
    """Return the body of a refusal by a failure policy."""
    return {"title": "The quota of this request cannot be checked now", "status": 503}


def blocked(status: int, message: str) -> dict[str, Any]:
    """Return the body of a refusal by a block. `message` tells the client the reason; "" for no reason."""
    return {"title": HTTPStatus(status).phrase, "status": status} | ({"detail": message} if message else {})


def problem(violated: Sequence[str], seconds: float | None, status: int = 429, text: str = "") -> dict[str, Any]:
    """Return the body of a refusal by rules, as application/problem+json (RFC 9457).

    `violated` are the names of the rules. `seconds` is the time until the request would be admitted. If it is None, the
    request would never be admitted. `text` is the text of the rule; "" for the sentence that says when to try again.
    """
    detail = text or (
        "This request can never be admitted." if seconds is None else f"Try again in {max(ceil(seconds), 1)} seconds."
    )
    return {
        "type": QUOTA_EXCEEDED,
        "title": "Request cannot be satisfied as assigned quota has been exceeded",
        "status": status,
        "detail": detail,
        "violated-policies": list(violated),
    }


def never_stored(response: HttpResponseBase) -> HttpResponseBase:
    """Say that no shared cache may store this refusal. Return the response."""
    for name in _FOR_SHARED_CACHES:
        response.headers.pop(name, None)
    if not _PRIVATE.search(response.headers.get("Cache-Control", "")):
        response.headers["Cache-Control"] = NEVER
    return response


def kept_for_caller(response: HttpResponseBase) -> HttpResponseBase:
    """Let no shared cache store a response that has the RateLimit fields of its caller. Return the response.

    If the view says that all callers may share the response, remove the fields instead.
    """
    headers = response.headers
    if "RateLimit" not in headers:
        return response
    control = headers.get("Cache-Control", "")
    is_private = _PRIVATE.search(control) is not None
    if any(name in headers for name in _FOR_SHARED_CACHES) or (_SHARED.search(control) and not is_private):
        for name in _FIELDS:
            headers.pop(name, None)
    elif not is_private:
        headers["Cache-Control"] = f"{control}, private" if control else "private"
    return response
