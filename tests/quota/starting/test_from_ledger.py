"""Test rules that start with the usage that the ledger has of their period."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from django.core.exceptions import ValidationError
from django.db import OperationalError

from ratelimits import rules
from ratelimits.embedded import free_port
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.identity import Identity
from ratelimits.models import Line, Rule
from ratelimits.quota.operating import reset
from ratelimits.quota.starting import from_ledger
from ratelimits.rules import ledger
from tests.support.entry_points import away, begin_afresh, counted
from tests.support.raw import RawRedis
from tests.support.rows import rule, unsaved

pytestmark = pytest.mark.django_db(transaction=True)

Check = Callable[..., Any]
USER = Identity(user="user:1", account="account:1", address="ip:203.0.113.9")
KEY = Identity(user="user:1", api_key="api_key:9", account="account:1", address="ip:203.0.113.9")
_ids = itertools.count(1)


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "DENY_CACHE_SECONDS": 0, "ACCOUNT": None}
    begin_afresh(monkeypatch)


def another_process() -> None:
    """Forget what this process knows, as a new process knows nothing."""
    from_ledger.forget()
    rules.forget()


def monthly(**fields: Any) -> Rule:
    return rule("monthly", "calendar_window", **{"capacity": 5, "start_from_ledger": True, **fields})


def used(
    key: str = "user:1", units: int = 3, *, refunded: int = 0, account: str = "1", ago: int = 0, **more: Any
) -> None:
    """Let the ledger have usage of this month, or of `ago` months before."""
    of = ("requests", "units")
    counts = {f"{kind}_{name}": 0 for kind in ("admitted", "denied", "refunded", "shadow") for name in of}
    period = rules.reload().billing(f"account:{account}").boundaries[1 - ago] // 10**6
    row = {**counts, "rule": 0, "version": 0, "checksum": 0, "batch_id": 1, "meter": "requests", "period": period}
    row |= {"admitted_units": units, "refunded_units": refunded, "bin": period + BIN_SECONDS, **more}
    Line.objects.create(id=next(_ids), key=key, account=account, **row)


def admitted(check: Check, identity: Identity = USER, tries: int = 6) -> int:
    return sum(check(identity).allowed for _ in range(tries))


def test_a_new_rule_does_not_begin_at_zero(check: Check) -> None:
    used(units=3)
    monthly()
    assert admitted(check) == 2


def test_usage_above_the_limit_refuses_and_says_until_when(check: Check) -> None:
    used(units=50)
    monthly()
    refused = check(USER)
    assert not refused.allowed
    assert refused.retry_after > 0
    assert refused.headers()["RateLimit"].startswith('"monthly";r=0;t=')


def test_without_the_option_it_begins_at_zero(check: Check) -> None:
    used(units=3)
    monthly(start_from_ledger=False)
    assert admitted(check) == 5


def test_the_start_itself_is_not_counted_as_usage(check: Check, redis_client: RawRedis) -> None:
    used(units=3)
    monthly()
    check(USER)
    assert [number for name, number in counted(redis_client).items() if name.startswith("a ")] == [1]


@pytest.mark.parametrize(
    ("kind", "identity", "left"),
    [("user", USER, 3), ("api_key", KEY, 1), ("key", KEY, 1), ("key", USER, 3), ("account", KEY, 0)],
)
def test_each_kind_of_key_has_its_own_usage(check: Check, kind: str, identity: Identity, left: int) -> None:
    used("user:1", 2)
    used("api_key:9", 5, refunded=1)
    used("user:1", 100, account="2")
    used("user:1", 100, meter="tokens")
    used("user:1", 100, ago=1)
    monthly(key_kind=kind)
    assert admitted(check, identity) == left


def test_it_happens_once_however_many_processes_ask(check: Check) -> None:
    used(units=2)
    monthly()
    assert admitted(check, tries=1) == 1
    for _ in range(3):
        another_process()
        used(units=1)  # The ledger gets what the rule has counted meanwhile.
    assert admitted(check) == 2


def test_two_processes_that_start_at_the_same_moment_charge_once(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    used(units=2)
    monthly()
    check(USER)
    monkeypatch.setattr(from_ledger, "_is_counted", lambda asked: False)
    another_process()
    assert admitted(check) == 2


def test_a_reset_stays_a_reset(check: Check) -> None:
    used(units=4)
    monthly()
    assert admitted(check) == 1
    reset("user:1", "monthly", "asked")
    another_process()
    assert admitted(check) == 5


def test_a_known_key_costs_no_query(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    read = ledger.read

    def noted(usage: Any) -> int:
        asked.append(usage)
        return read(usage)

    monkeypatch.setattr(ledger, "read", noted)
    monthly(capacity=100)
    for method in ("GET", "POST", "PUT"):
        check(USER, "*", method)
    assert len(asked) == 1
    Rule.objects.update(capacity=99)
    check(USER)
    assert len(asked) == 1
    another_process()
    check(USER)
    assert len(asked) == 1


@pytest.mark.parametrize(("policy", "allowed"), [("allow", True), ("deny", False)])
def test_without_the_database_the_failure_policy_answers(
    check: Check, monkeypatch: pytest.MonkeyPatch, policy: str, allowed: bool
) -> None:
    def fail(usage: Any) -> int:
        raise OperationalError("the database is away")

    used(units=5)
    monthly(on_failure=policy)
    with monkeypatch.context() as broken:
        broken.setattr(ledger, "read", fail)
        answer = check(USER)
        assert (answer.allowed, answer.unavailable, answer.decision) == (allowed, not allowed, None)
    rules.forget()  # it waits a second before it asks the database again
    assert not check(USER).allowed


@pytest.mark.parametrize(("policy", "allowed"), [("allow", True), ("deny", False)])
def test_without_redis_the_failure_policy_answers(check: Check, settings: Any, policy: str, allowed: bool) -> None:
    used(units=5)
    monthly(on_failure=policy)
    away(settings, free_port())
    found = [check(USER) for _ in range(3)]
    assert [(answer.allowed, answer.decision) for answer in found] == [(allowed, None)] * 3


def test_callers_without_an_account_begin_at_zero(check: Check) -> None:
    monthly()
    assert admitted(check, Identity(address="ip:203.0.113.9")) == 5


def test_a_rule_in_shadow_mode_starts_alike(check: Check) -> None:
    used(units=4)
    monthly(mode="shadow")
    assert [check(USER).decision.standings[0].allowed for _ in range(2)] == [True, False]


def test_what_a_process_remembers_is_bounded(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(from_ledger, "MAX_STARTED", 2)
    monthly()
    for number in range(5):
        assert check(Identity(user=f"user:{number}", account=f"account:{number}")).allowed
    assert len(from_ledger._started) <= 2


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"algorithm": "fixed_window", "period": 60, "calendar_unit": ""}, "choose a calendar window"),
        ({"calendar_unit": "year"}, "choose a calendar window"),
        ({"scope": "search"}, "write * as the scope"),
        ({"scope": "*:POST"}, "write * as the scope"),
        ({"except_scopes": "health"}, "without exceptions"),
        ({"key_kind": "ip"}, "count per user"),
        ({"prefetch": 10}, "prefetched permits are not in the ledger"),
    ],
)
def test_a_rule_whose_usage_the_ledger_cannot_tell_is_refused(fields: dict[str, Any], text: str) -> None:
    row = unsaved("monthly", "calendar_window", start_from_ledger=True)
    for name, value in fields.items():
        setattr(row, name, value)
    with pytest.raises(ValidationError) as refused:
        row.full_clean()
    assert text in refused.value.message_dict["start_from_ledger"][0]
