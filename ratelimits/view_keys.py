"""The keys that a view gives: a header, a query parameter, a field of the body, a URL argument, a function's result.

A rule that counts per "key that the view gives" counts requests with the same value together. The value can be secret
and of any length, so only its digest is used. All requests without the value share one key. If they had no key, such a
rule would not apply to them. `models/fields/view_key_texts.py` says which values are the same, and makes the names.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from asgiref.sync import sync_to_async
from django.core.exceptions import (
    BadRequest,
    ImproperlyConfigured,
    SuspiciousOperation,
    SynchronousOnlyOperation,
)
from django.db.models import Model
from django.http.multipartparser import MultiPartParserError

from ratelimits import naming
from ratelimits.background import awaited, is_awaitable
from ratelimits.conf import shown
from ratelimits.models.fields.view_key_texts import KeySource, name_of, normal_value, source_digest, source_of

if TYPE_CHECKING:
    from ratelimits.identity import Identity

#: How a view names a key: "header:X-Tenant", "query:team", "field:email", "arg:pk", or a function of the request.
OneKey = str | Callable[..., Any]
#: The key of a view, or its keys.
Key = OneKey | Sequence[OneKey]
#: Takes a request and the URL arguments, and returns the value as a text; None if the request has no such value.
_Reader = Callable[[Any, Mapping[str, Any]], str | None]

#: Errors of a body that cannot be read, such as JSON with thousands of brackets. The view or Django answers such a
#: request.
_UNREADABLE = BadRequest, MultiPartParserError, SuspiciousOperation, RecursionError


class AskedView(NamedTuple):
    """A request that a view answers, as its keys need it.

    request    a request of Django or of DRF
    arguments  the arguments of the view in the URL
    passed     the arguments that a function gets
    view       the view; None if no view has the URL
    place      where the key of the view is written, for messages
    """

    request: Any
    arguments: Mapping[str, Any]
    passed: tuple[Any, ...]
    view: object
    place: str

    @property
    def about(self) -> str:
        """Return the view and the place of its key, for messages."""
        return self.place if self.view is None else f"{function_path(self.view)}, {self.place}"


def with_view_keys(identity: Identity, key: Key, asked: AskedView) -> Identity:
    """Return the identity with the keys that the view gives.

    Wait for the result of an async function. Raise ImproperlyConfigured for a key that is not valid, and for a value of
    a wrong type.
    """
    names = []
    for one in _each(key):
        value = _in_request(one, asked)
        if is_awaitable(value):
            view = asked.place if asked.view is None else function_path(asked.view)
            value = awaited(value, f"The function {function_path(one)} ({asked.place})", view)
        names.append(_name(one, value, asked))
    return identity._replace(view_keys=_distinct(names, asked))


async def awith_view_keys(identity: Identity, key: Key, asked: AskedView) -> Identity:
    """Do the same as `with_view_keys`, in async code.

    If a function makes a query, Django refuses it in the event loop. Then the function is called again, in the thread
    for the synchronous code of this request.
    """
    names = []
    for one in _each(key):
        try:
            value = _in_request(one, asked)
        except SynchronousOnlyOperation:
            value = await sync_to_async(_in_request)(one, asked)
        if is_awaitable(value):
            value = await value
        try:
            names.append(_name(one, value, asked))
        except SynchronousOnlyOperation:  # a lazy object that makes a query
            names.append(await sync_to_async(_name)(one, value, asked))
    return identity._replace(view_keys=_distinct(names, asked))


def check_key(key: Key | None) -> None:
    """Raise ImproperlyConfigured if the key of a view, or one of its keys, is not valid."""
    if key is not None:
        sources_of(key)


def sources_of(key: Key) -> list[KeySource]:
    """Return the source of each key of a view. Raise ImproperlyConfigured if a key is not valid."""
    sources = [_function_source(one) if callable(one) else _source_and_reader(one)[0] for one in _each(key)]
    texts = [source.text for source in sources]
    if len({*texts}) < len(texts):
        raise ImproperlyConfigured(f"Two keys of a view have the same name: {', '.join(texts)}. {_OWN_NAMES}")
    return sources


def read(place: str, request: Any, arguments: Mapping[str, Any]) -> Any:
    """Return the value at a place in a request, such as "field:max_tokens"; None if the request has no such value.

    `arguments` are the arguments in the URL. Raise ImproperlyConfigured if the text is not a place.
    """
    return _source_and_reader(place)[1](request, arguments)


_OWN_NAMES = "Each key needs a name of its own. All lambdas of a module have the same name, so use `def` instead."


def _each(key: Key) -> Sequence[OneKey]:
    """Return each key of a view. Raise ImproperlyConfigured if there is none, or if a key has a wrong type."""
    each = key if isinstance(key, (list, tuple)) else (key,)
    if not each or not all(isinstance(one, str) or callable(one) for one in each):
        raise _wrong_key(key)
    return each


def _distinct(names: list[str], asked: AskedView) -> tuple[str, ...]:
    """Return the names. Raise ImproperlyConfigured if two of the keys have the same source."""
    if len(names) > 1 and len({*map(source_digest, names)}) < len(names):
        raise ImproperlyConfigured(f"{asked.about}: two keys have the same name. {_OWN_NAMES}")
    return tuple(names)


def _in_request(one: OneKey, asked: AskedView) -> Any:
    """Return the value of a key. For a function, this is its result, which can be an awaitable."""
    if not callable(one):
        return _source_and_reader(one)[1](asked.request, asked.arguments)
    # A method of the view has the view as `self`.
    is_method = getattr(one, "__self__", None) is asked.view
    return one(*(asked.passed[:1] if is_method else asked.passed))


def _name(one: OneKey, value: Any, asked: AskedView) -> str:
    """Return the name under which a value is counted."""
    source = _function_source(one) if callable(one) else _source_and_reader(one)[0]
    try:
        text = _text(value)
        if source.kind == "call":
            return name_of(source, text if isinstance(value, Model) else naming.spelled(text))
        normal = normal_value(source, text)
        if source.kind == "arg" and not isinstance(value, Model):
            normal = naming.unlike_a_row(normal)
        return name_of(source, normal)
    except TypeError:
        what = f"the function {source.name}" if callable(one) else f"{source.text!r}"
        raise ImproperlyConfigured(
            f"{asked.about}: {what} gives a value of the type {function_path(type(value))}. Give a text, bytes, a whole"
            " number, a UUID or a row of a model; or None if the request has no value."
        ) from None


def _text(value: Any) -> str:
    """Return a value as a text, and a row as its name; "" for no value. Raise TypeError if its type is not allowed."""
    if type(value) is str:
        return value
    # `isinstance` also knows a lazy object, such as `request.user`.
    if isinstance(value, Model):
        return "" if value.pk is None else naming.name_of(value) or ""
    if value is None or getattr(value, "is_anonymous", False) is True:
        return ""
    if isinstance(value, bytes):
        return bytes(value).decode(errors="surrogateescape")
    if isinstance(value, str):  # a subclass can have another text, as members of an enum have
        return str.__str__(value) if issubclass(type(value), str) else str(value)
    if isinstance(value, UUID) or (isinstance(value, int) and not isinstance(value, bool)):
        number = value if isinstance(value, UUID) else int(value)
        try:
            return str(number)
        except ValueError:  # a number with more than 4,300 digits
            return hex(int(number))
    raise TypeError


def function_path(function: Any) -> str:
    """Return the dotted path of a function, a class or an object's class, such as "shop.keys.tenant"."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def _function_source(function: Callable[..., Any]) -> KeySource:
    return source_of(f"call:{function_path(function)}")


@functools.lru_cache(maxsize=1024)
def _source_and_reader(text: str) -> tuple[KeySource, _Reader]:
    """Return the source of a key, and the function that reads its value. Raise ImproperlyConfigured for other texts."""
    try:
        source = source_of(str(text))
        return source, _READERS[source.kind](source.name)
    except (ValueError, KeyError) as error:
        raise _wrong_key(text) from error


def _wrong_key(key: object) -> ImproperlyConfigured:
    return ImproperlyConfigured(
        f"The key of a view is {shown(key)}. Write a function of the request, or a text such as 'header:X-Tenant',"
        " 'query:team', 'field:email' (of the body), 'field:email|lower' or 'arg:pk' (of the URL). A list has several"
        " keys."
    )


def _unreadable() -> tuple[type[Exception], ...]:
    """Return `_UNREADABLE`, with the errors of Django REST framework if the project uses it."""
    exceptions = sys.modules.get("rest_framework.exceptions")
    return (*_UNREADABLE, exceptions.APIException) if exceptions is not None else _UNREADABLE


def _header(name: str) -> _Reader:
    field = name.upper().replace("-", "_")
    meta = field if field in ("CONTENT_TYPE", "CONTENT_LENGTH") else f"HTTP_{field}"
    return lambda request, arguments: _as_typed(request.META.get(meta))


def _as_typed(value: str | None) -> str | None:
    """Return the text of a header as people type it. Servers give each byte as a character; most clients send UTF-8."""
    if value is None or value.isascii():
        return value
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:  # the client sent Latin-1, or a test has given a text that is no bytes
        return value


def _query(name: str) -> _Reader:
    # If the parameter has several values, this is the last one, which a view reads too.
    return lambda request, arguments: request.GET.get(name)


def _field(name: str) -> _Reader:
    def read(request: Any, arguments: Mapping[str, Any]) -> str | None:
        try:
            # Only a request of DRF has `parsers` and `data`.
            body = request.data if hasattr(request, "parsers") else request.POST
        except _unreadable():
            return None
        value = body.get(name) if isinstance(body, Mapping) or hasattr(body, "getlist") else None
        if isinstance(value, str):
            return value
        # JSON can have numbers. A client chooses the type, so a value of any other type is no value, and no error.
        is_number = isinstance(value, (int, float, Decimal)) and not isinstance(value, bool)
        return str(value) if is_number else None

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
