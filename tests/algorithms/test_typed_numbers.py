"""Test typed numbers against an independent model, which lists every number that a text can mean to somebody."""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ratelimits.algorithms.typed_numbers import PLAIN, Mistyped, Notation, decimal, whole, written

ENGLISH, GERMAN, FRENCH = Notation(".", ","), Notation(",", "."), Notation(",", "\u00a0")
NOTATIONS = st.sampled_from([PLAIN, ENGLISH, GERMAN, FRENCH])


def meanings(text: str) -> set[Fraction]:
    """Return what a text can mean, in any language with a point or a comma as its decimal sign."""
    found = set()
    for sign, others in ((".", ", \u00a0'"), (",", ". \u00a0'")):
        for between in others:
            shape = rf"(?:[0-9]+|[1-9][0-9]{{0,2}}(?:{re.escape(between)}[0-9]{{3}})+)?(?:{re.escape(sign)}[0-9]*)?"
            if re.fullmatch(shape, text) and any(map(str.isdigit, text)):
                whole_part, _sign, places = text.replace(between, "").partition(sign)
                found.add(Fraction(int((whole_part or "0") + places), 10 ** len(places)))
    return found


@given(st.text(st.sampled_from("0123459., \u00a0'"), min_size=1, max_size=10), NOTATIONS)
def test_a_text_is_read_as_one_of_its_meanings_or_refused(text: str, notation: Notation) -> None:
    text = text.strip()
    try:
        value = Fraction(decimal(text, notation))
    except Mistyped:
        return
    assert value in meanings(text)


@given(st.text(st.sampled_from("0159., '"), min_size=1, max_size=9), NOTATIONS)
def test_a_digit_alone_is_never_read_from_what_looks_like_thousands(text: str, notation: Notation) -> None:
    """`1.000`, `1,000` and `1 000` are a thousand, or are refused."""
    text = f"1{text}"
    if re.fullmatch(r"1(?:[., ']000)+", text):
        try:
            value = decimal(text, notation)
        except Mistyped as error:
            value = Decimal(re.findall("10+", str(error))[-1])
        assert value >= 1000


@given(st.decimals(-(10**12), 10**12, places=6), NOTATIONS)
def test_what_a_form_shows_is_read_as_the_same_number(value: Decimal, notation: Notation) -> None:
    assert decimal(written(value, notation), notation) == value


@given(st.integers(0, 10**15), st.integers(0, 999), st.sampled_from([ENGLISH, GERMAN, FRENCH]))
def test_a_number_as_a_language_writes_it_is_read(units: int, places: int, notation: Notation) -> None:
    grouped = f"{units:,}".replace(",", notation.thousands)
    assert whole(grouped, notation) == units or units < 1000
    assert decimal(f"{grouped}{notation.decimal}{places:02d}5", notation) == Decimal(f"{units}.{places:02d}5")


@pytest.mark.parametrize(
    ("text", "notation", "read"),
    [
        ("1.000", GERMAN, "1000"),
        ("1.000.000", GERMAN, "1000000"),
        ("1,5", GERMAN, "1.5"),
        ("0.125", GERMAN, "0.125"),
        ("1.125", GERMAN, "1125"),
        ("1.125", ENGLISH, "1.125"),
        ("1,000", ENGLISH, "1000"),
        ("1,000.50", ENGLISH, "1000.5"),
        ("1234.500", ENGLISH, "1234.5"),
        ("0.100", ENGLISH, "0.1"),
        ("1 000", PLAIN, "1000"),
        ("1\u202f000,5", FRENCH, "1000.5"),
        ("1'000", PLAIN, "1000"),
        (" +7 ", PLAIN, "7"),
        ("-3", PLAIN, "-3"),
        (".5", PLAIN, "0.5"),
        ("5.", PLAIN, "5"),
    ],
)
def test_a_language_decides(text: str, notation: Notation, read: str) -> None:
    assert decimal(text, notation) == Decimal(read)


@pytest.mark.parametrize(
    ("text", "notation", "message"),
    [
        ("1.000", ENGLISH, "“1.000” can mean 1 or 1000: write one of these two."),
        ("1.000", FRENCH, "“1.000” can mean 1 or 1000: write one of these two."),
        ("1,000", GERMAN, "“1,000” can mean 1 or 1000: write one of these two."),
        ("1,000", PLAIN, "“1,000” can mean 1 or 1000: write one of these two."),
        ("12.340", ENGLISH, "“12.340” can mean 12.34 or 12340: write one of these two."),
        ("1.000.000", ENGLISH, "“1.000.000” is not a number: write 1000000, without separators."),
        ("1,5", ENGLISH, "“1,5” is not a number: write digits, such as 1000 or 0.5."),
        ("1,00,000", ENGLISH, "“1,00,000” is not a number: write digits, such as 1000 or 0.5."),
        ("1_000", PLAIN, "“1_000” is not a number: write digits, such as 1000 or 0.5."),
        ("1e3", PLAIN, "“1e3” is not a number: write digits, such as 1000 or 0.5."),
        ("١", PLAIN, "“١” is not a number: write digits, such as 1000 or 0.5."),
        ("ten", GERMAN, "“ten” is not a number: write digits, such as 1000 or 0,5."),
        ("9" * 200, PLAIN, f"“{'9' * 100}…” is not a number: write digits, such as 1000 or 0.5."),
    ],
)
def test_what_is_not_certain_is_refused_with_what_to_write(text: str, notation: Notation, message: str) -> None:
    with pytest.raises(Mistyped) as caught:
        decimal(text, notation)
    assert str(caught.value) == message == caught.value.template % caught.value.values


def test_a_whole_number_has_no_places() -> None:
    assert whole("5.0") == 5
    for text in ("1.5", "ten", ""):
        with pytest.raises(Mistyped, match="is not a whole number: write digits only, such as 1000"):
            whole(text)
    with pytest.raises(Mistyped, match="can mean 1 or 1000"):
        whole("1.000")
