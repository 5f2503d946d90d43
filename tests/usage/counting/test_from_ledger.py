"""Test rules whose counts come from the ledger: at a key's first request, or after Redis has lost its data."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
from django.db import OperationalError

from ratelimits import rules
from ratelimits.embedded import free_port
from ratelimits.engine.call import Call
from ratelimits.engine.clock import clock
from ratelimits.engine.decide import decide_call
from ratelimits.engine.keys import BIN_SECONDS
from ratelimits.engine.server import current_server
from ratelimits.identity import Identity
from ratelimits.models import Rule
from ratelimits.status.operating import reset
from ratelimits.usage.counting import from_ledger
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.models import DurabilityGap, Line
from tests.support.entry_points import away, begin_afresh, counted
from tests.support.raw import RawRedis
from tests.support.rows import rule

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
    row = {**counts, "rule": 0, "version": 0, "checksum": 0, "batch_id": 1, "meter": "requests"}
    row |= {"admitted_units": units, "refunded_units": refunded, "bin": period + BIN_SECONDS, **more}
    Line.objects.create(id=next(_ids), key=key, account=account, **row)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list of all that the ledger is asked for."""
    asked: list[Any] = []
    read = from_ledger.read_usage

    def noted(usage: Any) -> int:
        asked.append(usage)
        return read(usage)

    monkeypatch.setattr(from_ledger, "read_usage", noted)
    return asked


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
    [("user", USER, 3), ("api_key", KEY, 1), ("caller", KEY, 3), ("caller", USER, 3), ("account", KEY, 0)],
)
def test_each_kind_of_key_has_its_own_usage(
    check: Check, settings: Any, kind: str, identity: Identity, left: int
) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": account_of}
    _each_kind(kind)
    assert admitted(check, identity) == left


@pytest.mark.parametrize(("kind", "identity"), [("user", USER), ("caller", KEY), ("caller", USER), ("account", KEY)])
def test_a_user_who_is_the_account_has_all_of_its_usage(
    check: Check, settings: Any, kind: str, identity: Identity
) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": None}
    _each_kind(kind)
    assert admitted(check, identity) == 0


def account_of(request: Any) -> str:
    return "1"


def _each_kind(kind: str) -> None:
    """Make usage of a user, of an API key, and other usage, and then a rule that starts from the ledger."""
    used("user:1", 2)
    used("api_key:9", 5, refunded=1)
    used("user:2", 100, account="2")
    used("user:1", 100, meter="tokens")
    used("user:1", 100, ago=1)
    monthly(key_kind=kind)


def test_it_happens_once_however_many_processes_ask(check: Check) -> None:
    used(units=2)
    monthly()
    assert admitted(check, tries=1) == 1
    for _ in range(3):
        another_process()
        used(units=1)  # The ledger gets what the rule has counted meanwhile.
    assert admitted(check) == 2


def test_another_process_may_do_it_and_count_a_request_in_between(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = from_ledger._restoring_call

    def raising(call: Call, counts: Any, units: list[int]) -> Call:
        decide_call(current_server(), real(call, counts, units))
        decide_call(current_server(), call)
        return real(call, counts, units)

    used(units=2)
    monthly()
    monkeypatch.setattr(from_ledger, "_restoring_call", raising)
    assert admitted(check) == 2


def test_a_reset_stays_a_reset(check: Check) -> None:
    used(units=4)
    monthly()
    assert admitted(check) == 1
    reset("user:1", "monthly", "asked")
    another_process()
    assert admitted(check) == 5


def test_a_known_key_costs_no_query(check: Check, asked: list[Any]) -> None:
    monthly(capacity=100)
    for method in ("GET", "POST", "PUT"):
        check(USER, "*", method)
    assert len(asked) == 1
    Rule.objects.update(capacity=99)
    check(USER)
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
        broken.setattr(from_ledger, "read_usage", fail)
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


def lasting(unit: str = "month", **fields: Any) -> Rule:
    return rule("lasting", "calendar_window", calendar_unit=unit, **{"capacity": 5, **fields})


def this_bin() -> int:
    now = int(time.time())
    return now - now % BIN_SECONDS


def lose(client: RawRedis) -> None:
    """Delete all data of the server, as an empty disk does."""
    client.flushall()


def forget_what_lives(client: RawRedis) -> None:
    """Let all keys with a time to live expire, as they do while the clock of Redis is far ahead."""
    for key in client.keys("*"):
        if client.pttl(key) >= 0:
            client.pexpire(key, 1)
            while client.exists(key):
                pass


class TestAfterALoss:
    @pytest.mark.parametrize("new_process", [False, True])
    def test_a_long_calendar_window_continues(self, check: Check, redis_client: RawRedis, new_process: bool) -> None:
        lasting()
        assert admitted(check, tries=3) == 3
        used(units=3, bin=this_bin())
        lose(redis_client)
        if new_process:
            another_process()
        assert admitted(check) == 2

    def test_each_key_continues_and_each_time(self, check: Check, redis_client: RawRedis) -> None:
        lasting(key_kind="api_key")
        other = KEY._replace(api_key="api_key:8")
        for loss in range(1, 3):
            for identity in (KEY, other):
                assert check(identity).allowed
                used(identity.api_key or "", units=1, bin=this_bin())
            lose(redis_client)
            assert admitted(check, KEY, tries=loss) == loss
            used("api_key:9", units=loss, bin=this_bin())
        assert (admitted(check, KEY), admitted(check, other)) == (0, 3)

    def test_a_wider_limit_still_counts_what_was_used_before(self, check: Check, redis_client: RawRedis) -> None:
        lasting()
        check(USER)
        used(units=4, bin=this_bin())
        lose(redis_client)
        Rule.objects.update(capacity=7)
        assert admitted(check, tries=9) == 3

    def test_an_older_copy_of_the_data_is_brought_up_to_date(self, check: Check, redis_client: RawRedis) -> None:
        lasting()
        check(USER)
        (key,) = redis_client.keys("*:s:account:1") or redis_client.keys("*:s:user:1")
        copy = redis_client.dump(key)
        assert admitted(check, tries=3) == 3
        used(units=4, bin=this_bin())
        redis_client.restore(key, 0, copy, replace=True)
        another_run(redis_client)
        redis_client.script_flush()
        another_process()
        assert admitted(check) == 1

    def test_more_than_the_ledger_has_stays(self, check: Check, redis_client: RawRedis) -> None:
        lasting()
        assert admitted(check, tries=4) == 4
        used(units=2, bin=this_bin())
        another_run(redis_client)
        another_process()
        assert admitted(check) == 1

    @pytest.mark.parametrize(
        ("unit", "fields", "left"),
        [
            ("day", {}, 1),
            ("hour", {}, 5),
            ("hour", {"lasting": True}, 1),
            ("month", {"lasting": False}, 5),
            ("month", {"scope": "*:POST"}, 5),
            ("month", {"mode": "shadow"}, 1),
        ],
    )
    def test_which_rules_continue(
        self, check: Check, redis_client: RawRedis, unit: str, fields: dict[str, Any], left: int
    ) -> None:
        lasting(unit, **fields)
        check(USER, "*", "POST")
        used(units=4, bin=this_bin())
        lose(redis_client)
        found = [check(USER, "*", "POST").decision.standings[0].allowed for _ in range(6)]
        assert found == [True] * left + [False] * (6 - left)

    def test_usage_from_before_the_rule_was_made_does_not_count(self, check: Check, redis_client: RawRedis) -> None:
        lasting()
        used(units=3)
        Rule.objects.update(counts_since=(this_bin() + BIN_SECONDS) * 10**6)
        used(units=4, bin=this_bin())
        lose(redis_client)
        assert admitted(check) == 5

    def test_a_reset_stays_a_reset(self, check: Check, redis_client: RawRedis) -> None:
        lasting()
        check(USER)
        used(units=4, bin=this_bin())
        lose(redis_client)
        reset("user:1", "lasting", "asked")
        another_process()
        assert admitted(check) == 5

    def test_nothing_is_read_while_the_data_is_older_than_the_window(
        self, check: Check, redis_client: RawRedis, asked: list[Any], settings: Any
    ) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "SHARDS": 1}
        lasting()
        check(USER)
        assert len(asked) == 1
        (meta,) = redis_client.keys("*:meta")
        redis_client.hset(meta, "data_since", 1)
        check(USER._replace(user="user:2"))
        another_process()
        check(USER)
        assert len(asked) == 1

    def test_a_clock_that_stepped_back_prevents_no_decision(self, check: Check, redis_client: RawRedis) -> None:
        lasting()
        check(USER)
        (meta,) = redis_client.keys("*:meta")
        redis_client.hset(meta, "data_since", int(time.time() + 3600) * 10**6)
        another_process()
        assert admitted(check) == 4

    @pytest.mark.parametrize("new_process", [False, True])
    @pytest.mark.parametrize("in_december", [0, 1, 5])
    def test_a_clock_that_jumps_into_the_next_month_and_back_admits_no_more_than_the_ledger_leaves(
        self,
        check: Check,
        redis_client: RawRedis,
        settings: Any,
        monkeypatch: pytest.MonkeyPatch,
        new_process: bool,
        in_december: int,
    ) -> None:
        """Jump with states that Redis still has, and with states that it has deleted because their time is over."""
        settings.RATELIMITS = {**settings.RATELIMITS, "SHARDS": 1}
        lasting()
        seal()
        assert admitted(check, tries=3) == 3
        (meta,) = redis_client.keys("*:meta")
        redis_client.hset(meta, "data_since", 1)
        used(units=3, bin=this_bin())
        with monkeypatch.context() as jumped:
            jumped.setattr(clock, "frozen", time.time_ns() // 1000 + 31 * 86_400 * 10**6)
            if in_december:
                assert admitted(check, tries=in_december) == in_december
            else:
                forget_what_lives(redis_client)
        if new_process:
            another_process()
        # What was spent while the clock was ahead stays spent.
        assert admitted(check) == 5 - max(3, in_december)
        assert admitted(check) == 0
        assert admitted(check, USER._replace(user="user:2")) == 5

    def test_after_a_jump_of_the_clock_each_key_reads_the_ledger_once(
        self, check: Check, redis_client: RawRedis, asked: list[Any], settings: Any
    ) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "SHARDS": 1}
        lasting()
        seal()
        check(USER)
        (meta,) = redis_client.keys("*:meta")
        redis_client.hset(meta, "data_since", 1)
        for noticed_by_seal in (False, True):
            del asked[:]
            used(units=4, bin=this_bin())
            forget_what_lives(redis_client)
            if noticed_by_seal:
                seal()
            other = USER._replace(user=f"user:{2 + noticed_by_seal}")
            assert [check(who).allowed for who in (USER, other, USER, other)] == [
                not noticed_by_seal,
                True,
                False,
                True,
            ]
            assert len(asked) == 2
            redis_client.hset(meta, "data_since", 1)
            seal()
            check(USER._replace(user=f"user:{4 + noticed_by_seal}"))
            assert len(asked) == 2
        assert DurabilityGap.objects.filter(kind="clock").count() == 2

    def test_callers_without_an_account_begin_at_zero(self, check: Check, asked: list[Any]) -> None:
        lasting(key_kind="caller")
        assert admitted(check, Identity(address="ip:203.0.113.9")) == 5
        assert asked == []

    @pytest.mark.parametrize(("policy", "allowed"), [("allow", True), ("deny", False)])
    def test_without_the_database_the_failure_policy_answers(
        self, check: Check, redis_client: RawRedis, monkeypatch: pytest.MonkeyPatch, policy: str, allowed: bool
    ) -> None:
        def fail(usage: Any) -> int:
            raise OperationalError("the database is away")

        lasting(on_failure=policy)
        check(USER)
        used(units=5, bin=this_bin())
        lose(redis_client)
        with monkeypatch.context() as broken:
            broken.setattr(from_ledger, "read_usage", fail)
            answer = check(USER)
            assert (answer.allowed, answer.decision) == (allowed, None)
        rules.forget()
        assert not check(USER).allowed


def another_run(client: RawRedis) -> None:
    """Let the shards have been used in an earlier run of the server."""
    for meta in client.keys("*:meta"):
        client.hset(meta, "data_run", "earlier")
    for head in client.keys("*:head"):
        client.set(head, client.get(head).split()[0] + b" earlier")
