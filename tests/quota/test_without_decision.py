"""Test what answers a request when Redis or the database could not be asked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from asgiref.sync import sync_to_async
from django.db import connection
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory

from ratelimits import rules
from ratelimits.algorithms.limits import Algorithm
from ratelimits.answers.answer import Answer
from ratelimits.decorators import limited
from ratelimits.embedded import free_port
from ratelimits.engine.call import Op
from ratelimits.identity import Identity
from ratelimits.models import ConfigVersion, Plan, Rule
from ratelimits.quota import checking, without_decision
from ratelimits.quota.standings import live_limits, run_uncounted
from ratelimits.quota.without_decision import MAX_KEYS, LocalLimiter
from tests.support.engine.asking import limit
from tests.support.entry_points import Clock, away, begin_afresh
from tests.support.rows import rule

KNOWN, UNKNOWN = Identity("user:1"), Identity("user:2")
Check = Callable[..., Answer]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    rules.forget()
    return begin_afresh(monkeypatch)


@pytest.fixture
def no_database() -> Iterator[Callable[[], None]]:
    """Return a function after whose call the rules cannot be read again."""
    table = ConfigVersion._meta.db_table
    renamed = False

    def rename() -> None:
        nonlocal renamed
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE {table} RENAME TO somewhere_else")
        renamed = True

    yield rename
    if renamed:
        with connection.cursor() as cursor:
            cursor.execute(f"ALTER TABLE somewhere_else RENAME TO {table}")
    rules.forget()


@pytest.mark.django_db(transaction=True)
class TestEditsWithoutEnd:
    def test_the_rules_that_were_just_read_decide(
        self, check: Check, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """An edit follows each time the rules were read, so they are always too old for Redis."""
        rule("slow", capacity=2, rate="0.000001", on_failure="deny")
        rule("wide", capacity=1000)
        real, areal, edits = rules.reload, rules.areload, []

        def edit() -> None:
            edits.append(1)
            Rule.objects.filter(name="wide").update(capacity=1000 + len(edits))

        def reload(version: int | None = None) -> rules.Snapshot:
            snapshot = real(version)
            edit()
            return snapshot

        async def areload(version: int | None = None) -> rules.Snapshot:
            snapshot = await areal(version)
            await sync_to_async(edit)()
            return snapshot

        assert check(KNOWN).allowed
        monkeypatch.setattr(rules, "reload", reload)
        monkeypatch.setattr(rules, "areload", areload)
        edit()
        with caplog.at_level(logging.WARNING):
            answers = [check(KNOWN) for _ in range(2)]
        assert len(edits) > checking.RELOADS
        assert [(one.allowed, one.unavailable) for one in answers] == [(True, False), (False, False)]
        assert all(one.decision is not None for one in answers)
        assert caplog.text == ""

    def test_the_rules_that_were_just_read_answer_who_only_asks(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The inspector, the throttle of the usage API and a reset ask without counting a request."""
        rule("slow", capacity=2, rate="0.000001")
        real, edits = rules.reload, []

        def reload(version: int | None = None) -> rules.Snapshot:
            snapshot = real(version)
            edits.append(1)
            Rule.objects.filter(name="slow").update(capacity=2 + len(edits))
            return snapshot

        monkeypatch.setattr(rules, "reload", reload)
        reload()
        (limit,), error = live_limits(KNOWN)
        assert error is None
        assert limit.standing is not None
        assert len(edits) > 1 + checking.RELOADS
        edits.clear()
        reload()
        _, decision = run_uncounted(KNOWN, lambda snapshot, identity: [snapshot.select("*", "", identity)], Op.PEEK)
        assert decision is not None
        assert len(edits) > checking.RELOADS


@pytest.mark.django_db(transaction=True)
class TestKeysThatWereNotRead:
    @pytest.mark.parametrize(
        ("policies", "allowed"),
        [(("allow",), True), (("deny",), False), (("allow", "deny"), False)],
    )
    def test_the_strictest_policy_that_may_apply_decides(
        self, check: Check, no_database: Callable[[], None], settings: Any, policies: tuple[str, ...], allowed: bool
    ) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "FAILURE_POLICY": "deny" if allowed else "allow"}
        for policy in policies:
            rule(policy, capacity=100, on_failure=policy)
        assert check(KNOWN).allowed
        no_database()
        answer = check(UNKNOWN)
        assert (answer.allowed, answer.unavailable) == (allowed, not allowed)
        assert check(KNOWN).decision is not None

    def test_a_rule_of_any_plan_may_apply(self, check: Check, no_database: Callable[[], None]) -> None:
        rule("strict", capacity=100, plan=Plan.objects.create(slug="pro", name="Pro"), on_failure="deny")
        assert check(KNOWN).allowed
        no_database()
        assert check(UNKNOWN).unavailable

    @pytest.mark.parametrize(
        "other",
        [{"scope": "search"}, {"scope": "*:POST"}, {"key_kind": "ip"}, {"mode": "shadow"}, {"meter": "tokens"}],
    )
    def test_a_rule_that_cannot_apply_has_no_say(
        self, check: Check, no_database: Callable[[], None], other: dict[str, Any]
    ) -> None:
        rule("elsewhere", capacity=100, on_failure="deny", **other)
        assert check(KNOWN).allowed
        no_database()
        assert check(UNKNOWN, "*", "GET").allowed

    def test_local_rules_limit_such_keys(self, check: Check, no_database: Callable[[], None]) -> None:
        rule("slow", capacity=3, rate="0.000001", on_failure="local")
        assert check(KNOWN).allowed
        no_database()
        assert [check(UNKNOWN).allowed for _ in range(5)] == [True] * 3 + [False] * 2


@pytest.mark.django_db(transaction=True)
class TestLocalShares:
    def test_more_than_its_share_is_told_when_to_come_again(self, check: Check, clock: Clock, settings: Any) -> None:
        rule("minute", "fixed_window", capacity=60, period=60, on_failure="local")
        away(settings, free_port())
        assert all(check(KNOWN).allowed for _ in range(60))
        refused = check(KNOWN)
        assert (refused.allowed, refused.unavailable, refused.retry_after) == (False, False, 1.0)
        assert refused.headers() == {"Retry-After": "1", "Cache-Control": "no-store, private"}
        clock.now += 1
        assert [check(KNOWN).allowed for _ in range(2)] == [True, False]

    def test_a_cost_above_the_share_can_never_pass(self, check: Check, settings: Any) -> None:
        rule("minute", "fixed_window", capacity=60, period=60, on_failure="local")
        away(settings, free_port())
        answer = check(KNOWN, costs={"requests": 61})
        assert (answer.allowed, answer.unavailable, answer.retry_after) == (False, False, None)

    def test_the_client_gets_429(self, settings: Any) -> None:
        rule("minute", "fixed_window", capacity=1, period=60, key_kind="ip", on_failure="local")
        away(settings, free_port())

        @limited()
        def view(request: HttpRequest) -> HttpResponse:
            return HttpResponse("done")

        responses = [view(RequestFactory().get("/")) for _ in range(2)]
        assert [one.status_code for one in responses] == [200, 429]
        assert 1 <= int(responses[1].headers["Retry-After"]) <= 60


def asked(
    algorithm: str, cost: int = 1, key: str = "user:1", name: str = "a", **numbers: Any
) -> tuple[str, str, Algorithm, int]:
    return key, name, limit(algorithm, **numbers).algorithm, cost


def admits(limiter: LocalLimiter, limits: list[Any]) -> bool:
    return limiter.charge(limits) == 0


class TestLocalLimiter:
    @pytest.fixture
    def clock(self) -> Clock:
        return Clock()

    @pytest.mark.parametrize(
        ("algorithm", "numbers", "quota", "seconds"),
        [
            ("fixed_window", {"capacity": 5, "period": 10}, 5, 10),
            ("sliding_log", {"capacity": 5, "period": 10}, 5, 10),
            ("token_bucket", {"capacity": 5, "rate": 2}, 5, 2.5),
            ("calendar_window", {"capacity": 5, "calendar_unit": "hour"}, 5, 3600),
            # A calendar window has no fixed length: a minute is used.
            ("calendar_window", {"capacity": 5}, 5, 60),
            ("concurrency", {"capacity": 5}, 5, 60),
            ("smooth_bursty", {"rate": 5, "capacity": None}, 5, 1),
            ("leaky_bucket_queue", {"capacity": 1, "rate": 5}, 2, 0.4),
        ],
    )
    def test_a_quota_passes_and_comes_back_over_its_window(
        self, clock: Clock, algorithm: str, numbers: dict[str, Any], quota: int, seconds: float
    ) -> None:
        limiter, one = LocalLimiter(clock), asked(algorithm, **numbers)
        assert [admits(limiter, [one]) for _ in range(quota + 1)] == [True] * quota + [False]
        clock.now += seconds / quota * 1.001
        assert [admits(limiter, [one]) for _ in range(2)] == [True, False]
        clock.now += seconds * 2
        assert [admits(limiter, [one]) for _ in range(quota + 1)] == [True] * quota + [False]

    @pytest.mark.parametrize("algorithm", ["fixed_window", "token_bucket", "leaky_bucket_queue", "concurrency"])
    def test_of_a_capacity_of_nothing_nothing_passes(self, clock: Clock, algorithm: str) -> None:
        limiter, one = LocalLimiter(clock), asked(algorithm, capacity=0)
        assert not admits(limiter, [one])
        clock.now += 1e9
        assert not admits(limiter, [one])
        assert admits(limiter, [asked(algorithm, cost=0, capacity=0)])

    def test_all_or_none_are_charged(self, clock: Clock) -> None:
        limiter = LocalLimiter(clock)
        wide, tight = asked("fixed_window", period=60), asked("fixed_window", name="b", capacity=1, period=60)
        assert admits(limiter, [wide, tight])
        for _ in range(20):
            assert not admits(limiter, [wide, tight])
        assert [admits(limiter, [wide]) for _ in range(10)] == [True] * 9 + [False]

    def test_keys_and_names_are_apart(self, clock: Clock) -> None:
        limiter = LocalLimiter(clock)
        for key in ("user:1", "user:2"):
            for name in ("a", "b"):
                one = asked("fixed_window", key=key, name=name, capacity=1, period=60)
                assert [admits(limiter, [one]) for _ in range(2)] == [True, False]

    def test_costs(self, clock: Clock) -> None:
        limiter = LocalLimiter(clock)
        assert admits(limiter, [asked("fixed_window", 10, period=60)])
        assert admits(limiter, [asked("fixed_window", 0, period=60)])
        assert not admits(limiter, [asked("fixed_window", 1, period=60)])
        assert not admits(limiter, [asked("fixed_window", 11, key="user:2", period=60)])
        assert admits(limiter, [])

    def test_it_remembers_so_many_keys_and_forgets_the_longest_unused(
        self, clock: Clock, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert MAX_KEYS >= 10_000
        monkeypatch.setattr(without_decision, "MAX_KEYS", 3)
        limiter = LocalLimiter(clock)
        numbers: dict[str, Any] = {"capacity": 1, "period": 60}
        for number in range(3):
            assert admits(limiter, [asked("fixed_window", key=f"user:{number}", **numbers)])
        assert not admits(limiter, [asked("fixed_window", key="user:0", **numbers)])
        assert admits(limiter, [asked("fixed_window", key="user:3", **numbers)])
        assert admits(limiter, [asked("fixed_window", key="user:0", **numbers)])
        assert not admits(limiter, [asked("fixed_window", key="user:2", **numbers)])

    def test_threads_are_admitted_as_often_as_the_quota_says(self, clock: Clock) -> None:
        limiter, one, seen = LocalLimiter(clock), asked("fixed_window", capacity=300, period=60), []

        def work() -> None:
            seen.append(sum(admits(limiter, [one]) for _ in range(200)))

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(seen) == 300
