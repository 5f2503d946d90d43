"""Keep what is meant for one caller out of the caches that several callers share.

A shared cache, such as Varnish, a CDN or Django's cache middleware, may store a response and send it to other callers.
Varnish stores some statuses, such as 200, 404 and 410, even if the response says nothing about caches.
"""

from __future__ import annotations

import re

from django.http.response import HttpResponseBase

#: Cache-Control of a refusal. Django's cache middleware obeys only "private", and other caches "no-store".
NEVER = "no-store, private"
#: The names of the fields that describe the limits of one caller.
_FIELDS = "RateLimit", "RateLimit-Policy", "X-RateLimit-Limit", "X-RateLimit-Remaining", "X-RateLimit-Reset"
_PRIVATE = re.compile(r"\b(?:private|no-store)\b(?!=)", re.IGNORECASE)
#: The words with which a view says that all callers may share its response, and header fields for the caches of CDNs.
_SHARED = re.compile(r"\b(?:public|s-maxage)\b", re.IGNORECASE)
_FOR_SHARED_CACHES = "CDN-Cache-Control", "Surrogate-Control"


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
