"""The key that a view gives: a header, a query parameter, a field of the body, a URL argument, or a function's result.

A rule that counts per "key that the view gives" counts requests with the same value together. The value can be secret
and of any length, so only its digest is used. All requests without the value share one key. If they had no key, such a
rule would not apply to them.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.core.exceptions import BadRequest, ImproperlyConfigured, SuspiciousOperation
from django.http.multipartparser import MultiPartParserError

from ratelimits.conf import shown

if TYPE_CHECKING:
    from ratelimits.identity import Identity

#: How a view names its key: "header:X-Tenant", "query:team", "field:email", "arg:pk", or a function of the request.
Key = str | Callable[..., Any]
#: Takes a request and the URL arguments, and returns the value; None if the request has no such value.
_Reader = Callable[[Any, Mapping[str, Any]], Any]

#: Errors of a body that cannot be read. The view or Django answers such a request.
_UNREADABLE = BadRequest, MultiPartParserError, SuspiciousOperation


def _unreadable() -> tuple[type[Exception], ...]:
    """Return `_UNREADABLE`, with the errors of Django REST framework if the project uses it."""
    exceptions = sys.modules.get("rest_framework.exceptions")
    return (*_UNREADABLE, exceptions.APIException) if exceptions is not None else _UNREADABLE


def with_view_key(
    identity: Identity, key: Key | None, request: Any, arguments: Mapping[str, Any], *function_arguments: Any
) -> Identity:
    """Return the identity with the key that the view gives. If `key` is None, return the identity unchanged.

    `request` is a request of Django or of DRF, and `arguments` are its URL arguments. If `key` is a function, it is
    called with `function_arguments`. Raise ImproperlyConfigured for a key that is not valid.
    """
    return (
        identity if key is None else identity._replace(view_key=view_key(key, request, arguments, *function_arguments))
    )


def view_key(key: Key, request: Any, arguments: Mapping[str, Any], *function_arguments: Any) -> str:
    """Return a request's key, such as "view_key:5f2c…". `with_view_key` describes the arguments and the errors."""
    if callable(key):
        value, source = key(*function_arguments), ""
        value = getattr(value, "pk", value)  # for a row of a model: its primary key
    else:
        value, source = reader(key)(request, arguments), key
    text = source if value is None or value == "" else f"{source}\0{value}"
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=12).hexdigest()
    return f"view_key:{digest}"


def check_key(key: Key | None) -> None:
    """Raise ImproperlyConfigured if a view's key is not valid."""
    if key is not None and not callable(key):
        reader(key)


@lru_cache(maxsize=1024)
def reader(key: str) -> _Reader:
    """Return the function that reads the value of a key. Raise ImproperlyConfigured if the text is not a key."""
    source, _colon, name = str(key).partition(":")
    if source not in _READERS or not name:
        raise ImproperlyConfigured(
            f"The key of a view is {shown(key)}. Write a function of the request, or a text such as 'header:X-Tenant',"
            " 'query:team', 'field:email' (of the body) or 'arg:pk' (of the URL)."
        )
    return _READERS[source](name)


def _header(name: str) -> _Reader:
    field = name.upper().replace("-", "_")
    meta = field if field in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{field}"
    return lambda request, arguments: request.META.get(meta)


def _query(name: str) -> _Reader:
    return lambda request, arguments: request.GET.get(name)


def _field(name: str) -> _Reader:
    def read(request: Any, arguments: Mapping[str, Any]) -> Any:
        try:
            # Only a request of DRF has `parsers` and `data`.
            body = request.data if hasattr(request, "parsers") else request.POST
        except _unreadable():
            return None
        return body.get(name) if isinstance(body, Mapping) or hasattr(body, "getlist") else None

    return read


def _argument(name: str) -> _Reader:
    return lambda request, arguments: arguments.get(name)


#: The functions that make a reader, by the word before the colon of a key, such as "header" in "header:X-Tenant".
_READERS: dict[str, Callable[[str], _Reader]] = {
    "header": _header,
    "query": _query,
    "field": _field,
    "arg": _argument,
}
