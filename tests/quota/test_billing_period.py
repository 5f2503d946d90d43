"""Test rules with the unit "billing_period": their windows are the periods of the account that makes the request."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from ratelimits import engine, rules
from ratelimits.answers.answer import Answer
from ratelimits.engine.clock import clock
from ratelimits.identity import Identity
from ratelimits.models import Account, KeyOverride, Rule
from ratelimits.quota import checking, from_memory
from ratelimits.quota.standings import live_limits, standings
from ratelimits.rules.loader import Loader
from ratelimits.status.operating import reset
from ratelimits.usage.models import ShardState
from tests.support.entry_points import away, begin_afresh
from tests.support.raw import RawRedis
from tests.support.reports.edits import edit_at
from tests.support.rows import rule
from tests.support.usage.traffic import at, flow

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]

Check = Callable[..., Answer]
START = at("2026-11-20T00:00")
TENTH, TOKYO = "2026-01-10T00:00", "Asia/Tokyo"
SECOND, HOUR = 1_000_000, 3_600_000_000


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch, settings: Any) -> Iterator[None]:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": None, "DENY_CACHE_SECONDS": 0}
    begin_afresh(monkeypatch)
    monkeypatch.setattr(clock, "frozen", START)
    monkeypatch.setattr(from_memory.denials, "clock", lambda: clock.now() / SECOND)
    rules.use_clock(clock.now)
    yield
    rules.use_clock(None)


def per_period(capacity: int = 2, **fields: Any) -> Rule:
    values = {"capacity": capacity, "calendar_unit": "billing_period", "key_kind": "account", **fields}
    return rule("per-period", "calendar_window", **values)


def account(identifier: str = "1", timezone: str = "UTC", anchor: str = "") -> Account:
    return Account.objects.create(identifier=identifier, timezone=timezone, billing_anchor=anchor)


def who(account: str = "1") -> Identity:
    return Identity(user=f"user:{account}", account=f"account:{account}", address="ip:203.0.113.9")


def ends(answer: Answer) -> int:
    """Return the end of the window in µs, as an answer says it."""
    seconds = answer.decision.reset_after if answer.allowed and answer.decision is not None else answer.retry_after
    assert seconds is not None
    return clock.now() + round(seconds * SECOND)


@pytest.mark.parametrize("kind", ["account", "user", "caller"])
@pytest.mark.parametrize(
    ("terms", "end"),
    [
        (None, "2026-12-01T00:00"),
        (("UTC", ""), "2026-12-01T00:00"),
        (("UTC", TENTH), "2026-12-10T00:00"),
        ((TOKYO, ""), "2026-12-01T00:00+09:00"),
        ((TOKYO, TENTH), "2026-12-10T00:00+09:00"),
        (("America/New_York", "2026-01-31T06:15"), "2026-11-30T06:15-05:00"),
        (("Mars/Olympus", TENTH), "2026-12-01T00:00"),
    ],
)
def test_the_window_ends_with_the_period_of_the_account(
    check: Check, kind: str, terms: tuple[str, str] | None, end: str
) -> None:
    per_period(key_kind=kind)
    if terms is not None:
        account("1", *terms)
    answers = [check(who()) for _ in range(3)]
    assert [answer.allowed for answer in answers] == [True, True, False]
    assert {ends(answer) for answer in answers} == {at(end)}
    left = (at(end) - START) // SECOND
    assert answers[0].headers()["RateLimit"] == f'"per-period";r=1;t={left}'
    assert answers[0].headers()["RateLimit-Policy"] == '"per-period";q=2'
    assert answers[2].headers()["Retry-After"] == str(left)
    clock.frozen = at(end) - 1
    assert not check(who()).allowed
    clock.frozen = at(end)
    assert [check(who()).allowed for _ in range(3)] == [True, True, False]


def test_each_account_has_its_own_period(check: Check) -> None:
    per_period(1)
    for name, anchor in (("1", ""), ("2", TENTH), ("3", "2026-01-25T12:00")):
        account(name, anchor=anchor)
    expected = [at(f"2026-{end}") for end in ("12-01T00:00", "12-10T00:00", "11-25T12:00")]
    for _ in range(2):
        assert [ends(check(who(name))) for name in "123"] == expected
    clock.frozen = at("2026-12-01T00:00")
    assert [check(who(name)).allowed for name in "123"] == [True, False, True]


def test_a_caller_without_an_account_has_months_of_utc(check: Check) -> None:
    per_period(1, key_kind="caller")
    assert ends(check(Identity(address="ip:203.0.113.9"))) == at("2026-12-01T00:00")


def test_edited_terms_hold_at_the_next_decision_and_keep_what_is_spent(check: Check) -> None:
    per_period(3)
    assert ends(check(who())) == at("2026-12-01T00:00")
    with edit_at(START):
        row = account(anchor=TENTH)
    assert ends(check(who())) == at("2026-12-10T00:00")
    clock.frozen = START + 2 * HOUR
    with edit_at(clock.now()):
        row.timezone = TOKYO
        row.save()
    answer = check(who())
    assert (answer.allowed, ends(answer)) == (True, at("2026-12-10T00:00+09:00"))
    with edit_at(clock.now()):
        row.delete()
    answer = check(who())
    assert (answer.allowed, ends(answer)) == (False, at("2026-12-01T00:00"))


def test_a_period_that_was_used_keeps_its_end_and_so_does_the_window(check: Check) -> None:
    per_period(2)
    row = account(anchor=TENTH)
    assert check(who()).allowed
    flow()
    with edit_at(START + HOUR):
        row.timezone, row.billing_anchor = "UTC", "2026-01-25T00:00"
        row.save()
    clock.frozen = at("2026-11-25T00:00")
    assert [(one.allowed, ends(one)) for one in (check(who()), check(who()))] == [
        (True, at("2026-12-10T00:00")),
        (False, at("2026-12-10T00:00")),
    ]
    clock.frozen = at("2026-12-10T00:00")
    assert ends(check(who())) == at("2026-12-25T00:00")
    clock.frozen = at("2026-12-25T00:00")
    assert ends(check(who())) == at("2027-01-25T00:00")


def used_from_the_tenth_of_november(check: Check, **terms: str) -> None:
    """Let an account use its period from 10 November to 10 December, and then get these terms."""
    row = account(anchor=TENTH)
    assert check(who()).allowed
    flow()
    with edit_at(START + HOUR):
        Account.objects.filter(pk=row.pk).update(**{"billing_anchor": "", **terms})


@pytest.mark.parametrize(
    ("moment", "end"),
    [
        ("2026-09-01T00:00", "2026-09-25T00:00"),
        ("2026-10-24T23:59", "2026-10-25T00:00"),
        ("2026-10-25T00:00", "2026-11-10T00:00"),
        ("2026-11-09T23:59", "2026-11-10T00:00"),
        ("2026-11-10T00:00", "2026-12-10T00:00"),
    ],
)
def test_a_clock_that_is_behind_has_periods_that_end_before_the_used_one(check: Check, moment: str, end: str) -> None:
    """The used period did not move, so the one before ends where it starts."""
    per_period(2)
    used_from_the_tenth_of_november(check, billing_anchor="2026-01-25T00:00")
    clock.frozen = at(moment)
    assert ends(check(who("1"))) == at(end)


def test_a_used_period_keeps_its_end_if_the_terms_cannot_be_read(check: Check, caplog: Any) -> None:
    """Raw SQL gave the account a time zone that does not exist. After the used period come months of UTC."""
    per_period(2)
    used_from_the_tenth_of_november(check, timezone="Mars/Olympus", billing_anchor="2026-01-25T00:00")
    assert ends(check(who())) == at("2026-12-10T00:00")
    assert rules.current().billing("account:1").boundaries[1:3] == (at("2026-11-10T00:00"), at("2026-12-10T00:00"))
    clock.frozen = at("2026-12-10T00:00")
    assert ends(check(who())) == at("2027-01-01T00:00")
    assert "The billing periods of 'account:1' are not valid, so months in UTC are used" in caplog.text


def test_another_process_has_the_edited_terms_at_its_next_decision() -> None:
    per_period(2)
    assert checking.check(who()).allowed
    here, other = rules.current(), Loader(clock.now)
    assert other.current().period_terms("account:1").anchor is None
    account(anchor=TENTH)
    # This process has not read the edit. Redis tells it at the next decision that its rules are too old.
    assert rules.current() is here
    assert ends(checking.check(who())) == at("2026-12-10T00:00")
    assert rules.current() is not here


def test_a_remembered_refusal_ends_with_the_period(check: Check, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "DENY_CACHE_SECONDS": 60}
    per_period(1)
    account(anchor=TENTH)
    end = at("2026-12-10T00:00")
    clock.frozen = end - SECOND // 2
    assert [check(who()).allowed for _ in range(3)] == [True, False, False]
    assert from_memory.denials.refusals
    clock.frozen = end
    assert [check(who()).allowed for _ in range(2)] == [True, False]


def test_prefetched_permits_end_with_the_period(check: Check) -> None:
    per_period(8, prefetch=4)
    account(anchor=TENTH)
    end = at("2026-12-10T00:00")
    clock.frozen = end - 10 * SECOND
    assert [check(who()).allowed for _ in range(9)] == [True] * 8 + [False]
    clock.frozen = end
    assert [check(who()).allowed for _ in range(9)] == [True] * 8 + [False]


def test_an_override_has_its_number_in_the_same_period(check: Check) -> None:
    per_period(1)
    account(anchor=TENTH)
    KeyOverride.objects.create(key="account:1", rule="per-period", capacity=3)
    answers = [check(who()) for _ in range(4)]
    assert [answer.allowed for answer in answers] == [True, True, True, False]
    assert {ends(answer) for answer in answers} == {at("2026-12-10T00:00")}


def test_standings_and_resets_are_of_the_present_period() -> None:
    per_period(2)
    account(timezone=TOKYO)
    assert [checking.check(who()).allowed for _ in range(3)] == [True, True, False]
    left = (at("2026-12-01T00:00+09:00") - START) / SECOND

    def shown() -> tuple[int, float]:
        ((_rule, key, standing),) = standings(who(), lambda snapshot, who: [snapshot.select("*", "", who)])
        (live,), error = live_limits(who())
        assert (key, error, live.standing) == ("account:1", None, standing)
        return standing.remaining, standing.reset_after

    assert shown() == (0, left)
    reset("account:1", "per-period", "asked")
    assert shown() == (2, 0)
    assert checking.check(who()).allowed
    assert shown() == (1, left)


def test_a_receipt_is_settled_in_the_window_that_it_charged() -> None:
    per_period(10)
    row = account(anchor=TENTH)
    decision = checking.check(who(), costs={"requests": 6}).decision
    assert decision is not None
    receipt = pickle.loads(pickle.dumps(decision.receipt))
    assert receipt == decision.receipt
    row.timezone = TOKYO
    row.save()
    engine.settle(receipt, [2])
    assert checking.check(who(), costs={"requests": 8}).allowed
    assert not checking.check(who()).allowed


def test_a_refund_after_the_period_gives_nothing_back() -> None:
    per_period(2)
    account(anchor=TENTH)
    decision = checking.check(who()).decision
    assert decision is not None
    assert decision.receipt is not None
    clock.frozen = at("2026-12-10T00:00")
    assert checking.check(who()).allowed
    engine.refund(decision.receipt)
    assert [checking.check(who()).allowed for _ in range(2)] == [True, False]


def lose(client: RawRedis) -> None:
    """Bring the usage to the ledger. Then let the server lose its data, and this process what it knows."""
    flow()
    client.flushall()
    rules.forget()


@pytest.mark.parametrize("kind", ["account", "user"])
def test_after_a_loss_it_goes_on_with_the_usage_of_the_period(check: Check, redis_client: RawRedis, kind: str) -> None:
    Rule.objects.filter(pk=per_period(3, key_kind=kind).pk).update(counts_since=0)
    account(anchor=TENTH)
    clock.frozen = at("2026-11-09T23:59")  # in the period before
    assert check(who()).allowed
    clock.frozen = at("2026-11-10T00:00")
    assert [check(who()).allowed for _ in range(2)] == [True, True]
    clock.frozen = at("2026-12-02T00:00")
    lose(redis_client)
    assert [check(who()).allowed for _ in range(2)] == [True, False]


def test_it_can_start_from_the_ledger(check: Check) -> None:
    account(timezone=TOKYO)
    clock.frozen = at("2026-11-01T00:00+09:00")
    for _ in range(3):
        assert check(who()).allowed
    flow()
    assert ShardState.objects.filter(tallied__gt=0).exists()
    clock.frozen = START
    per_period(4, start_from_ledger=True)
    assert [check(who()).allowed for _ in range(2)] == [True, False]


def test_without_redis_the_failure_policy_decides(check: Check, settings: Any) -> None:
    per_period(2, on_failure="deny")
    account(anchor=TENTH)
    assert check(who()).allowed
    away(settings, 1)
    answer = check(who())
    assert (answer.allowed, answer.unavailable) == (False, True)


def test_a_request_whose_account_cannot_be_read_is_decided_by_the_failure_policy(check: Check, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ONE_ACCOUNT_PER_KEY": True}
    per_period(2, key_kind="api_key", on_failure="deny")
    unreadable = Identity(api_key="api_key:7", unreadable=("user", "account"))
    assert not check(unreadable).allowed
    assert check(unreadable._replace(account="account:1", unreadable=())).allowed


def test_accounts_share_what_is_prepared_if_no_rule_follows_their_periods() -> None:
    rule("monthly", "calendar_window", key_kind="account")
    with edit_at(START - 2 * HOUR):
        account(anchor=TENTH)
    snapshot = rules.reload()
    assert snapshot.select("*", "", who("1")) is snapshot.select("*", "", who("2"))
    per_period()
    snapshot = rules.reload()
    assert snapshot.select("*", "", who("1")) is not snapshot.select("*", "", who("2"))
    assert snapshot.select("*", "", who("3")) is snapshot.select("*", "", who("2"))


def test_many_callers_at_once_take_no_more_than_the_capacity() -> None:
    per_period(50)
    account(timezone=TOKYO, anchor=TENTH)

    async def ask() -> list[bool]:
        return [answer.allowed for answer in await asyncio.gather(*(checking.acheck(who()) for _ in range(80)))]

    assert sum(asyncio.run(ask())) == 50
