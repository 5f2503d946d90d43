"""Test that any user, API key or account gets a name that people can type, and that no other value gets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from hypothesis import given, settings
from hypothesis import strategies as st

from ratelimits.engine.keys import LONGEST_NAME, ledger_name
from ratelimits.files import neutral, restorable, restored
from ratelimits.models import Access, Account, KeyOverride, PlanMembership
from ratelimits.models.access.targets import canonical
from ratelimits.models.keys import canonical_account, canonical_key, spelled_key, validate_key
from ratelimits.naming import is_shown, name_of, spelled, text_of
from tests.identity.conftest import Device, Team

#: Parts of texts that could be taken for something else, or that forms, pages and databases change.
PARTS = [
    *("user:", "api_key:", "account:", "ip:", "global:", "tests.team:", "tests.device:", "header:", "arg:"),
    *("=", "~", "-", "%", "%0A", "%zz", "==", "~" + "0" * 32, "=~", ":~", "'", '"', "+", "@", "#"),
    *(" ", "  ", ",", ";", "/", "|", "\n", "\r\n", "\t", "\0", "\x1f", "\x7f", "\x85", "\xa0", "\xad"),
    *("\u200b", "\u2028", "\u3000", "\ufeff", "\ufffe", "\ud800", "\udc80", "\U000e0041", "é", "e\u0301", "𠮷"),
    *("4", "42", "٣", "a", "A", "CN=Max Muster,OU=x", "x" * 251),
]
TEXTS = st.one_of(
    st.text(st.characters(), min_size=1, max_size=12),
    st.lists(st.sampled_from(PARTS), min_size=1, max_size=5).map("".join),
)
VALUES = st.one_of(
    TEXTS,
    st.integers(-9, 99),
    st.uuids(),
    st.builds(Team, pk=TEXTS),
    st.builds(Device, pk=TEXTS),
    st.builds(User, pk=TEXTS),
)


def names(value: Any) -> Iterator[tuple[str, str]]:
    """Yield the keys that a value gives as a user, an API key and an account, each with the name in it."""
    name = str(name_of(value, User))
    yield ledger_name(f"user:{name}"), name
    yield ledger_name(f"api_key:{name_of(value)}"), str(name_of(value))
    yield f"account:{ledger_name(name)}", name
    yield f"account:{ledger_name(f'user:{name}')}", name


def cleaned(model: Any, field: str, text: str) -> Any:
    """Return what a form makes of a typed text."""
    return model._meta.get_field(field).formfield().clean(text)


@settings(max_examples=500)
@given(VALUES)
def test_what_is_shown_can_be_typed_in_each_form_and_stays_as_it_is(value: Any) -> None:
    for key, _name in names(value):
        validate_key(key)
        assert canonical_key(key) == spelled_key(key) == canonical(key) == key
        forms: list[tuple[Any, str]] = [(KeyOverride, "key"), (PlanMembership, "key"), (Access, "target")]
        assert {cleaned(model, field, key) for model, field in forms} == {key}
        kind, _colon, name = key.partition(":")
        if kind == "account":
            assert cleaned(Account, "identifier", name) == canonical_account(name) == name != "-"
        # A page shows a run of spaces as one, and an input has no line ends.
        assert " ".join(key.split()) == key
        assert is_shown(key)
        key.encode()
        assert len(name) <= LONGEST_NAME
        # A file for spreadsheets gives the name back, and no cell is a formula.
        assert restored(restorable(name)) == name
        assert neutral(restorable(name)) == restorable(name)


@settings(max_examples=300)
@given(st.lists(VALUES, min_size=2, max_size=6, unique_by=lambda one: (type(one), str(getattr(one, "pk", one)))))
def test_two_values_never_share_a_name(values: list[Any]) -> None:
    for one, other in combinations(values, 2):
        # A number and its text are one name, and so are a row of the user model and its primary key.
        plain = [value.pk if isinstance(value, User) else value for value in (one, other)]
        if str(plain[0]) == str(plain[1]) and not any(isinstance(value, Team | Device) for value in plain):
            continue
        mine, others = ({key for key, _name in names(value)} for value in (one, other))
        assert not mine & others


@settings(max_examples=500)
@given(TEXTS)
def test_a_spelling_stands_for_one_text(text: str) -> None:
    assert text_of(spelled(text)) == text
    # Whoever writes a text that is no name reads which name to write.
    for key in (f"user:{text}", f"account:{text}"):
        if spelled_key(key) != key:
            with pytest.raises(ValidationError):
                validate_key(key)


@settings(max_examples=300)
@given(TEXTS)
def test_a_row_that_code_saves_has_the_name_of_its_text(text: str) -> None:
    """Texts that begin like a name of another kind are such names. All others are texts."""
    if re.match(r"user:|api_key:|=|[^\W\d]\w*\.\w+:|(?:[^:]{0,15}:)?~[0-9a-f]{32}\Z", text):
        return
    user, account = ledger_name(f"user:{name_of(text)}"), ledger_name(str(name_of(text)))
    assert KeyOverride.derive({"key": f"user:{text}"})["key"] == user
    assert PlanMembership.derive({"key": f"user:{text}"})["key"] == user
    assert Access.derive({"target": f"user:{text}"})["target"] == user
    assert Account.derive({"identifier": text})["identifier"] == account


def test_usual_names_are_the_texts_themselves() -> None:
    for text in ("42", "ada@example.com", "CN=Max Muster,OU=x", "Acme, Inc.", "auth0|9f3c", "a:b", "50%", "Größe 7"):
        assert name_of(text) == text


@pytest.mark.parametrize(
    ("text", "name"),
    [
        *(("x user:5", "=x%20user:5"), ("team/user:5", "=team%2Fuser:5"), ("a, account:b", "=a%2C%20account:b")),
        *((" a ", "=%20a%20"), ("a  b", "=a %20b"), ("a\nb", "=a%0Ab"), ("\x85", "=%C2%85"), ("\u2028", "=%E2%80%A8")),
        *(("-", "=-"), ("4, 5", "=4, 5"), ("50%\0", "=50%25%00"), ("=50%", "==50%25"), ("\ud800", "=%ED%A0%80")),
    ],
)
def test_a_text_that_nobody_can_type_has_a_spelling(text: str, name: str) -> None:
    assert name_of(text) == name
    assert name_of(Team(pk=text)) == f"tests.team:{name if name not in ('=-', '=4, 5') else text}"
