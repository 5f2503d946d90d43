"""Test what pages and commands know of keys without the floors above."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command

from ratelimits.models import KeyOverride
from ratelimits.status.additions import Additions, registered, used_keys
from ratelimits.status.keys import (
    accounts_of_key,
    all_tables,
    keys_of_account,
    known_accounts,
    known_keys,
    no_owner_text,
)
from ratelimits.status.operating import NO_ACCOUNT, UnknownAccountError, identity_of
from ratelimits.usage.models import KeyTotal
from ratelimits.usage.models.totals import DAY, SUMS, newest_days
from tests.support.alone import alone
from tests.support.entry_points import begin_afresh
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def without_usage(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let a key have usage that only the floor above knows."""
    begin_afresh(monkeypatch)
    subject = {"account": "acme", "key": "api_key:7", "rule": 0, "meter": "requests"}
    KeyTotal.objects.create(span=DAY, start=newest_days(time.time(), 2)[1], **subject, **dict.fromkeys(SUMS, 1))
    assert [one.key for one in known_keys("api_key:7", all_tables()).keys] == ["api_key:7"]
    assert accounts_of_key("api_key:7") == ["acme"]
    with alone():
        yield


def test_what_is_taken_away_comes_back() -> None:
    assert (used_keys(), registered) == ([], [])
    added = Additions()
    registered.append(added)
    with alone():
        assert registered == []
    assert registered == [added]


def test_keys_are_found_in_the_rows_that_people_edit() -> None:
    KeyOverride.objects.create(key="api_key:8", rule="r", mode="off")
    assert KeyTotal not in all_tables()
    assert [one.key for one in known_keys("api_key", all_tables()).keys] == ["api_key:8"]
    assert known_accounts("acme", all_tables()) == []
    assert (keys_of_account("acme"), accounts_of_key("api_key:7")) == ([], [])


def test_whoever_has_no_row_is_unknown() -> None:
    user = User.objects.create(username="ann")
    assert no_owner_text(f"user:{user.pk}") == ""
    assert "No account has the identifier “acme”" in no_owner_text("account:acme")


def test_the_account_of_a_key_must_be_named() -> None:
    rule("burst", "fixed_window", capacity=2, period=60, key_kind="api_key")
    with pytest.raises(UnknownAccountError):
        identity_of("api_key:7")
    out = io.StringIO()
    call_command("ratelimits_key", "show", "api_key:7", "--account", NO_ACCOUNT, stdout=out)
    assert "burst (enforce), counted for api_key:7: 2 of 2 requests left" in out.getvalue()
