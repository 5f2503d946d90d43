"""Test what a view's key reads from bodies, and what it makes of values."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.core.exceptions import ImproperlyConfigured
from django.test import RequestFactory
from django.utils.functional import SimpleLazyObject
from rest_framework.parsers import JSONParser
from rest_framework.request import Request

from ratelimits.decorators import limited
from ratelimits.identity import Identity
from ratelimits.models.keys import canonical_key, key_name, validate_key
from ratelimits.ninja import limited as ninja_limited
from ratelimits.view_keys import AskedView, with_view_keys


def keys(request: Any, key: Any, **arguments: Any) -> tuple[str, ...]:
    return with_view_keys(Identity(), key, AskedView(request, arguments, (request,), None, "key")).view_keys


def key(request: Any, source: Any = "field:team", **arguments: Any) -> str:
    (name,) = keys(request, source, **arguments)
    return name


def json(text: str) -> Request:
    request = RequestFactory().post("/", text, content_type="application/json")
    return Request(request, parsers=[JSONParser()])


EMPTY = key(RequestFactory().post("/"))


def test_a_key_has_a_bounded_length_and_differs_by_source() -> None:
    request = RequestFactory().get("/", {"team": "a"}, headers={"Team": "a"})
    found = [key(request, "query:team"), key(request, "header:team"), key(request, "arg:team", team="a")]
    assert len(set(found)) == 3
    assert {len(one) for one in found} == {len("view_key:") + 8 + 1 + 24}


def header(sent: bytes) -> str:
    # A server gives each byte as a character.
    return key(RequestFactory().get("/", headers={"X-Tenant": sent.decode("latin-1")}), "header:X-Tenant")


@pytest.mark.parametrize("text", ["café", "Pietà", "東京", "Ã©", "\u00c5"])
def test_a_header_is_read_as_people_type_it(text: str) -> None:
    typed = f"header:X-Tenant={text}"
    validate_key(typed)
    assert header(text.encode()) == key_name(typed)


def test_headers_of_other_bytes_stay_what_they_are() -> None:
    assert header("café".encode("latin-1")) == key_name("header:X-Tenant=café")
    # White space is removed at the end of a text, not of its bytes: these end in a byte that is white space in Latin-1.
    assert len({header(text.encode()) for text in ("Piet", "Pietà", "PietÅ")}) == 3


@pytest.mark.parametrize("text", ["{", "[]", "7", "{}", '{"team": null}', '{"team": ""}', "[" * 8_000])
def test_a_body_without_the_field_has_the_key_of_no_value(text: str) -> None:
    assert key(json(text)) == EMPTY


def test_a_field_of_json_may_be_a_text_or_a_number() -> None:
    texts = '{"team": "a"}', '{"team": 7}', '{"team": 7.5}', '{"team": "\\ud800"}', '{"team": 0}', '{"team": 1e400}'
    found = {key(json(text)) for text in texts}
    assert len(found - {EMPTY}) == len(texts)
    assert key(json('{"team": 7}')) == key(json('{"team": 7.0}')) == key(json('{"team": "07"}'))


@pytest.mark.parametrize("value", ["true", "[1]", '["a"]', '{"b": 1}', "[" * 90 + "]" * 90])
def test_a_field_of_json_of_another_type_is_no_value(value: str) -> None:
    assert key(json(f'{{"team": {value}}}')) == EMPTY


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        ("x", "multipart/form-data"),
        ("x", "multipart/form-data; boundary=" + "b" * 300),
        ("&".join(f"f{number}=1" for number in range(2000)), "application/x-www-form-urlencoded"),
        ("team=a", "application/x-www-form-urlencoded; charset=latin-1"),
    ],
)
def test_a_form_that_cannot_be_read_has_the_key_of_no_value(body: str, content_type: str) -> None:
    assert key(RequestFactory().generic("POST", "/", body, content_type=content_type)) == EMPTY


@pytest.mark.django_db
def test_a_function_may_return_a_row() -> None:
    group = Group.objects.create(name="staff")
    request = RequestFactory().get("/")
    assert key(request, lambda request: group) == key(request, lambda request: SimpleLazyObject(lambda: group))


def given(request: Any) -> Any:
    return request.given


def asked_for(value: Any) -> Any:
    request: Any = RequestFactory().get("/")
    request.given = value
    return request


@pytest.mark.parametrize("source", [given, "arg:pk"], ids=["function", "argument"])
def test_no_text_is_the_key_of_a_row(source: Any) -> None:
    texts = ["auth.group:3", "=auth.group:3", "==auth.group:3", "\uff41uth.group:3"]
    found = [key(asked_for(value), source, pk=value) for value in (Group(pk=3), *texts)]
    assert len({*found[:4]}) == 4
    assert found[0] not in found[1:]


@pytest.mark.parametrize(
    ("value", "typed"),
    [
        *((Group(pk=3), "auth.group:3"), ("auth.group:3", "=auth.group:3"), ("acme", "acme"), (7, "7"), ("", "")),
        *(("a\nb ", "=a%0Ab%20"), ("\udc80", "=%ED%B2%80"), ("user:5", "=user:5"), (b"\xff", "=%ED%B3%BF")),
    ],
)
def test_the_result_of_a_function_can_be_typed_as_it_is_named(value: Any, typed: str) -> None:
    text = f"call:{__name__}.given={typed}"
    validate_key(text)
    assert canonical_key(text) == text
    assert key(asked_for(value), given) == key_name(text)


async def awaited(request: Any) -> str:
    return "acme"


async def test_an_async_function_in_sync_code_in_an_event_loop_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ImproperlyConfigured) as raised:
        key(RequestFactory().get("/"), awaited)
    assert str(raised.value) == (
        f"The function {__name__}.awaited (key) is async, but key is decided by sync code in an event loop. Write a"
        " sync function, or make the view async."
    )


def test_an_async_function_is_awaited_by_sync_code() -> None:
    assert key(RequestFactory().get("/"), awaited) == key_name(f"call:{__name__}.awaited=acme")


@pytest.mark.parametrize(
    "source",
    [[["header:X-Tenant"]], {"header:X-Tenant": 1}, {"header:X-Tenant"}, 7, [], (), [None], b"query:a", ""],
    ids=repr,
)
def test_a_key_of_another_type_is_an_error_that_says_what_to_write(source: Any) -> None:
    for decorate in (limited(key=source), ninja_limited(key=source)):
        with pytest.raises(ImproperlyConfigured, match="Write a function of the request, or a text such as"):
            decorate(lambda request: None)
    with pytest.raises(ImproperlyConfigured, match="Write a function of the request, or a text such as"):
        keys(RequestFactory().get("/"), source)


def test_several_keys_can_be_a_list() -> None:
    limited(key=["header:X-Tenant", "arg:pk"])(lambda request: None)
