"""Test which texts of view keys mean the same value, and that each value has a name of its own."""

from __future__ import annotations

import sys
import time
import unicodedata
from typing import Any

import pytest
from django import forms
from django.core.exceptions import ValidationError
from hypothesis import example, given
from hypothesis import strategies as st
from rest_framework import serializers

from ratelimits.models.fields.view_key_texts import name_of, normal_value, read, source_of
from ratelimits.models.keys import canonical_key, key_name, validate_key

SOURCES = [source_of(text) for text in ("header:X-Tenant", "query:team", "field:email", "field:email|lower", "arg:pk")]
#: Texts that are often numbers, or nearly.
_NUMBERS = st.text("0123456789+-_. ٠١٢７８\t", max_size=8)
_TEXTS = st.one_of(st.text(), _NUMBERS, st.text("aAﬁéeÅ\u030a\u0301İıß \u00a0\u2003", max_size=6))


def _name(text: str, source: Any = SOURCES[1]) -> str:
    return name_of(source, normal_value(source, text))


def _readings(text: str) -> list[object]:
    """Return what views read from a text: as text, as a normal form, and as a number with three kinds of code."""
    readings: list[object] = [("text", text.strip()), ("NFKC", unicodedata.normalize("NFKC", text.strip()))]
    for reader in (int, forms.IntegerField().clean, serializers.IntegerField().run_validation):
        try:
            readings.append(("number", reader(text)))
        except (ValueError, ValidationError, serializers.ValidationError):
            continue
    return readings


@given(_TEXTS, _TEXTS)
@example("01", "+1")
@example("١", "1.0")
@example("1_0", "10")
@example("-0", "0")
@example("\u00a8a", "\u0308a")
def test_two_texts_that_a_view_reads_as_one_value_have_one_name(one: str, other: str) -> None:
    if set(_readings(one)) & set(_readings(other)):
        assert _name(one) == _name(other)


@given(_TEXTS, st.sampled_from(["NFC", "NFD", "NFKC", "NFKD"]), st.sampled_from(["", " ", "\t", "\u2003", "\u00a0"]))
def test_a_text_in_another_form_has_the_same_name(text: str, form: Any, space: str) -> None:
    alias = space + unicodedata.normalize(form, text) + space
    if set(_readings(text)) & set(_readings(alias)):
        assert _name(text) == _name(alias)


@given(st.integers(), st.sampled_from(["{}", " {}\n", "{}.", "{}.00", "\u2003{}"]), st.integers(0, 3))
def test_a_number_in_any_spelling_has_the_name_of_the_number(number: int, spelling: str, zeros: int) -> None:
    sign, digits = ("-" if number < 0 else "+"), "0" * zeros + str(abs(number))
    in_arabic = digits.translate({ord(str(digit)): chr(0x660 + digit) for digit in range(10)})
    for text in (digits, in_arabic):
        assert _name(spelling.format(sign + text)) == _name(str(number))


@given(_TEXTS, _TEXTS, st.sampled_from(SOURCES), st.sampled_from(SOURCES))
def test_two_normal_forms_never_have_one_name(one: str, other: str, source: Any, other_source: Any) -> None:
    forms_of_value = (source, normal_value(source, one)), (other_source, normal_value(other_source, other))
    names = {name_of(*form) for form in forms_of_value}
    assert len(names) == len(set(forms_of_value))


@given(_TEXTS, st.sampled_from(SOURCES))
def test_a_normal_form_is_its_own_normal_form(text: str, source: Any) -> None:
    form = normal_value(source, text)
    assert normal_value(source, form) == form


@given(_TEXTS, st.sampled_from(SOURCES))
def test_what_people_type_has_the_name_of_the_requests_with_this_value(text: str, source: Any) -> None:
    typed = f"{source.text}={text}"
    assert key_name(typed) == key_name(canonical_key(typed)) == _name(text, source)
    assert canonical_key(canonical_key(typed)) == canonical_key(typed)


def test_case_stays_unless_the_source_says_otherwise() -> None:
    assert _name("A@x.com", SOURCES[2]) != _name("a@x.com", SOURCES[2])
    assert _name("A@x.com", SOURCES[3]) == _name(" a@x.COM", SOURCES[3])


def test_the_result_of_a_function_is_not_changed() -> None:
    source = source_of("call:shop.keys.tenant")
    assert len({_name(text, source) for text in ("1", "01", " 1", "a", "A")}) == 5


@pytest.mark.parametrize("digits", [640, 4_300, 4_301, 10_000, 1_000_000])
def test_a_number_of_any_length_is_read_or_left_alone(digits: int) -> None:
    text, most = "0" + "9" * (digits - 1), sys.get_int_max_str_digits()
    assert normal_value(SOURCES[1], text) == (text.lstrip("0") if digits <= most else text)


@pytest.mark.parametrize(
    "text",
    [" ", "9", "٩", "1_", "é", "\ufdfa", "a\u0301", "\u0301\u0323", "İ", ".0", "0", "1.", "+", "\ud800"],
)
@pytest.mark.parametrize("source", SOURCES[2:4], ids=lambda source: str(source.text))
def test_a_huge_text_costs_little(text: str, source: Any) -> None:
    huge = text * (1_000_000 // len(text))
    start = time.process_time()
    for value in (huge, f"x{huge}", f"1.{huge}", huge[:1_000]):
        name_of(source, normal_value(source, value))
    assert time.process_time() - start < 0.3


@pytest.mark.parametrize(
    ("typed", "stored"),
    [
        ("header:x_tenant= Acme ", "header:X-Tenant=Acme"),
        ("arg:pk=+007", "arg:pk=7"),
        ("field:email|lower=A@X.com", "field:email|lower=a@x.com"),
        ("query:q=a=b", "query:q=a=b"),
        ("call:shop.keys.tenant=shop.tenant:3", "call:shop.keys.tenant=shop.tenant:3"),
        ("header:X-Tenant=", "header:X-Tenant="),
        ("user:42", "user:42"),
    ],
)
def test_a_typed_key_has_one_stored_form(typed: str, stored: str) -> None:
    validate_key(typed)
    assert canonical_key(typed) == stored
    source, _equals, value = stored.partition("=")
    if value:
        assert key_name(stored) != key_name(f"{source}={value}x")


@pytest.mark.parametrize(
    "text",
    ["header:=a", "header:X-Tenant", "query:=", "field:email|upper=a", "field:|lower=a", "call:a|lower=b", "arg: =1"],
)
def test_other_texts_are_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match=r"view|value|end"):
        read(text)
    with pytest.raises(ValidationError, match="header:X-Tenant=acme"):
        validate_key(text)
    assert key_name(text) == canonical_key(text) == text


def test_a_key_whose_stored_form_is_too_long_is_refused() -> None:
    validate_key("header:X-Tenant=" + "a" * 144)
    with pytest.raises(ValidationError, match="at most 263 characters"):
        validate_key("header:X-Tenant=" + "\ufdfa" * 20)


def test_a_key_that_cannot_be_shown_is_refused() -> None:
    with pytest.raises(ValidationError, match="can be shown"):
        validate_key("header:X-Tenant=a\x00b")
