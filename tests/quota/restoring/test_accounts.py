"""Test limits that outlive Redis, of users and API keys that have several accounts."""

from __future__ import annotations

from typing import Any

import pytest

from ratelimits.identity import Identity
from ratelimits.quota import checking
from tests.support.entry_points import begin_afresh
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("kind", ["user", "api_key"])
@pytest.mark.parametrize("shards", [4, 64])
def test_each_further_account_of_a_key_finds_its_one_count(
    kind: str, shards: int, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.RATELIMITS = {
        **settings.RATELIMITS,
        "ACCOUNT": lambda request: "acme",
        "DENY_CACHE_SECONDS": 0,
        "SHARDS": shards,
    }
    begin_afresh(monkeypatch)
    rule("monthly", "calendar_window", capacity=1, key_kind=kind)
    accounts = [Identity("user:1", "api_key:7", f"account:{name}") for name in "aabcdefg"]
    answers = [checking.check(who) for who in accounts]
    assert [answer.allowed for answer in answers] == [True] + [False] * 7
    assert all(answer.decision is not None for answer in answers)
