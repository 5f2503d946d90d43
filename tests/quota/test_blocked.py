"""Test what lets nothing pass: capacity 0, rules that cannot be read, and too many rules for one decision."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import redis
from django.db import connection

from ratelimits import rules
from ratelimits.answers.answer import Answer
from ratelimits.embedded import free_port
from ratelimits.engine.counting import Count
from ratelimits.engine.program import MAX_LIMITS
from ratelimits.engine.server import publications
from ratelimits.identity import Identity
from ratelimits.models import Account, KeyOverride, Rule
from ratelimits.quota import checking, from_memory, prepared
from ratelimits.rules import AppliedRule
from tests.end_to_end.test_round_trips import commands_of_clients
from tests.support.entry_points import Clock, away, begin_afresh, counted
from tests.support.rows import NEEDED, rule, unsaved

pytestmark = pytest.mark.django_db(transaction=True)

WHO = Identity("user:1", "api_key:9", "account:acme", "ip:203.0.113.9")
Check = Callable[..., Answer]
WITH_CAPACITY = [name for name, needed in NEEDED.items() if "capacity" in needed]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return begin_afresh(monkeypatch)


class TestCapacityZero:
    @pytest.mark.parametrize("algorithm", WITH_CAPACITY)
    def test_nothing_passes_without_a_command_and_all_of_it_is_counted_as_denied(
        self, check: Check, algorithm: str, redis_client: redis.Redis, redis_url: str
    ) -> None:
        row, other = rule("closed", algorithm, capacity=0), rule("a", capacity=5)
        with commands_of_clients(redis_url) as commands:
            answers = [check(WHO) for _ in range(6)]
        assert [(one.allowed, one.retry_after, one.unavailable) for one in answers] == [(False, None, False)] * 6
        # The thread that sends the counts may have run meanwhile; but nothing asks for a decision.
        counting = f"EVALSHA {Count.script.sha.decode()}"
        assert [one for one in commands if "EVALSHA" in one and not one.startswith(counting)] == []
        assert isinstance(answers[0].binding, AppliedRule)
        assert answers[0].binding.rule == row.pk
        fields = answers[0].headers()
        assert fields["RateLimit"] == '"closed";r=0'
        assert '"closed";q=0' in fields["RateLimit-Policy"]
        assert "Retry-After" not in fields
        from_memory.sender.flush()
        assert counted(redis_client) == {f"d requests {row.pk} acme api_key:9 1": 6}
        row.delete()
        after = check(WHO)
        assert after.allowed
        assert after.decision is not None
        assert (after.binding.rule, after.decision.remaining) == (other.pk, 4)  # type: ignore[union-attr]

    def test_an_edit_closes_and_opens_at_the_next_request(self, check: Check) -> None:
        rule(capacity=2, rate="0.000001")
        assert [check(WHO).allowed for _ in range(2)] == [True, True]
        Rule.objects.update(capacity=0)
        from_memory.denials.clear()
        assert [check(WHO).allowed for _ in range(6)] == [False] * 6
        Rule.objects.update(capacity=3)
        assert [check(WHO).allowed for _ in range(2)] == [True, False]

    def test_an_edit_by_another_process_opens_it_with_the_next_sending_of_counts(self, check: Check) -> None:
        rule(capacity=0)
        assert not check(WHO).allowed
        known = rules.current()
        # As another process would edit: this process gets no notice.
        published = publications()
        Rule.objects.update(capacity=3)
        prepared.commands_by(known).publications = published + 1
        assert not check(WHO).allowed
        from_memory.sender.flush()
        assert check(WHO).allowed

    def test_an_override_of_zero_blocks_one_key_and_a_cost_of_nothing_passes(self, check: Check) -> None:
        rule(capacity=5, initial="3")
        KeyOverride.objects.create(key="user:1", rule="burst", capacity=0)
        blocked, other = Identity("user:1"), Identity("user:2")
        assert [check(one).allowed for one in (blocked, other)] == [False, True]
        assert check(blocked, costs={"requests": 0}).allowed
        assert check(blocked, costs={"tokens": 7}).allowed

    def test_a_shadow_rule_of_zero_records_and_never_refuses(self, check: Check, redis_client: redis.Redis) -> None:
        row = rule(capacity=0, mode="shadow")
        assert [check(WHO).allowed for _ in range(3)] == [True] * 3
        assert counted(redis_client) == {
            "a requests 0 acme api_key:9 1": 3,
            f"s requests {row.pk} acme api_key:9 1": 3,
        }

    def test_it_holds_while_redis_is_away_whatever_the_failure_policy(self, check: Check, settings: Any) -> None:
        rule(capacity=0, on_failure="allow")
        away(settings, free_port())
        assert [check(WHO).allowed for _ in range(6)] == [False] * 6

    def test_with_prefetched_permits_too(self, check: Check) -> None:
        rule("many", "fixed_window", prefetch=8)
        assert check(WHO).allowed
        Rule.objects.update(capacity=0)
        rules.reload()
        assert not check(WHO).allowed

    def test_many_tasks_at_once_pass_nothing(self) -> None:
        rule(capacity=0)

        async def burst() -> list[Answer]:
            return await asyncio.gather(*(checking.acheck(WHO) for _ in range(1000)))

        assert not any(answer.allowed for answer in asyncio.run(burst()))


def _no_zone(**fields: Any) -> Rule:
    row = rule("broken", "calendar_window", **fields)
    Rule.objects.filter(pk=row.pk).update(timezone="Mars/Olympus")
    return row


class TestUnreadable:
    @pytest.mark.parametrize(("on_failure", "passes"), [("allow", True), ("deny", False), ("local", False)])
    def test_a_rule_that_cannot_be_read_follows_its_own_policy(
        self, check: Check, on_failure: str, passes: bool, caplog: pytest.LogCaptureFixture, redis_client: redis.Redis
    ) -> None:
        rule("a", capacity=2, rate="0.000001")
        _no_zone(on_failure=on_failure)
        answers = [check(WHO) for _ in range(3)]
        assert [one.allowed for one in answers] == ([True, True, False] if passes else [False] * 3)
        assert [one.unavailable for one in answers] == [not passes] * 2 + [not passes]
        assert caplog.text.count("Mars/Olympus") == 1
        if not passes:
            assert counted(redis_client) == {}
            Rule.objects.filter(name="broken").update(timezone="UTC")
            assert check(WHO).decision.standings[0].remaining == 1  # type: ignore[union-attr]
        else:
            assert "a requests 0 acme api_key:9 1" in counted(redis_client)

    def test_the_project_decides_where_the_rule_does_not(self, check: Check, settings: Any) -> None:
        _no_zone()
        assert check(WHO).allowed
        settings.RATELIMITS = {**settings.RATELIMITS, "FAILURE_POLICY": "deny"}
        rules.forget()
        answer = check(WHO)
        assert (answer.allowed, answer.unavailable, answer.retry_after) == (False, True, 1.0)

    def test_requests_that_it_would_not_have_applied_to_pass(self, check: Check) -> None:
        _no_zone(on_failure="deny", scope="search", meter="tokens", key_kind="user")
        assert check(WHO).allowed
        assert check(WHO, "search").allowed
        assert check(WHO, "search", costs={"tokens": 0}).allowed
        assert check(Identity(api_key="api_key:3"), "search", costs={"tokens": 1}).allowed
        assert not check(WHO, "search", costs={"tokens": 1}).allowed
        Rule.objects.update(mode="shadow")
        assert check(WHO, "search", costs={"tokens": 1}).allowed

    @pytest.mark.parametrize(
        "broken",
        [{"sub_windows": 7}, {"sub_windows": 0}, {"period": "0.000001"}, {"capacity": 10**13}],
    )
    def test_numbers_that_make_no_sense(self, check: Check, broken: dict[str, Any]) -> None:
        rule(algorithm="sliding_window", on_failure="deny")
        Rule.objects.update(**broken)
        assert check(WHO).unavailable

    @pytest.mark.parametrize(
        ("written", "elsewhere"),
        [("search:post", True), ("search:POST;PUT", True), ("search, text", False), ("", False)],
    )
    def test_a_scope_that_no_form_would_take(self, check: Check, written: str, elsewhere: bool) -> None:
        rule(on_failure="deny", scope="search")
        Rule.objects.update(scope=written)
        assert [check(WHO, "search", method).unavailable for method in ("POST", "PUT", "GET")] == [True] * 3
        # If the scope cannot be read, the rule may be meant for this request.
        assert check(WHO, "other").allowed == elsewhere
        assert "not in force: scope" in Rule.objects.get().sentence()

    def test_what_no_constraint_would_let_in(self, check: Check) -> None:
        for name in ("algorithm", "capacity", "kind"):
            rule(name, on_failure="deny", scope=name)
        if connection.vendor == "sqlite":
            with connection.cursor() as cursor:
                cursor.execute("PRAGMA ignore_check_constraints = ON")
        else:
            with connection.cursor() as cursor:
                for constraint in ("complete", "key_kind"):
                    cursor.execute(f"ALTER TABLE ratelimits_rule DROP CONSTRAINT ratelimits_rule_{constraint}")
        try:
            Rule.objects.filter(name="algorithm").update(algorithm="bucket")
            Rule.objects.filter(name="capacity").update(capacity=None)
            Rule.objects.filter(name="kind").update(key_kind="team")
            for scope in ("algorithm", "capacity", "kind"):
                assert check(WHO, scope).unavailable, scope
            assert check(WHO).allowed
            assert all("not in force" in row.sentence() for row in Rule.objects.all())
        finally:
            Rule.objects.all().delete()
            with connection.cursor() as cursor:
                if connection.vendor == "sqlite":
                    cursor.execute("PRAGMA ignore_check_constraints = OFF")
                else:
                    for dropped in Rule._meta.constraints:
                        if dropped.name in ("ratelimits_rule_complete", "ratelimits_rule_key_kind"):
                            cursor.execute(str(dropped.create_sql(Rule, connection.schema_editor())))

    @pytest.mark.parametrize("column", ["rate", "period", "max_wait"])
    def test_a_number_that_is_none(self, check: Check, column: str, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "FAILURE_POLICY": "deny"}
        rule()
        with connection.cursor() as cursor:
            # PostgreSQL stores NaN, SQLite stores the text; no constraint refuses them.
            cursor.execute(f"UPDATE ratelimits_rule SET {column} = 'NaN'")
        answer = check(WHO)
        assert (answer.allowed, answer.unavailable) == (False, True)

    def test_an_override_that_cannot_be_read_concerns_its_key_alone(self, check: Check) -> None:
        rule(on_failure="deny")
        KeyOverride.objects.create(key="user:1", rule="burst", rate=0)
        assert check(Identity("user:1")).unavailable
        assert check(Identity("user:2")).allowed

    def test_an_account_whose_calendar_is_broken_is_limited_by_months_in_utc(
        self, check: Check, caplog: pytest.LogCaptureFixture, redis_client: redis.Redis
    ) -> None:
        Account.objects.create(identifier="acme")
        Account.objects.update(timezone="Mars/Olympus")
        rule("per-period", "calendar_window", calendar_unit="billing_period", capacity=2, key_kind="account")
        assert [check(WHO).allowed for _ in range(3)] == [True, True, False]
        assert counted(redis_client)["a requests 0 acme api_key:9 1"] == 2
        assert caplog.text.count("Mars/Olympus") == 1

    def test_while_redis_is_away_its_policy_holds_as_well(self, check: Check, settings: Any) -> None:
        rule("a", on_failure="allow")
        _no_zone(on_failure="deny")
        away(settings, free_port())
        assert [check(WHO).unavailable for _ in range(6)] == [True] * 6


class TestTooMany:
    def test_the_most_that_are_allowed_are_decided_whatever_their_algorithms(self, check: Check) -> None:
        kinds = list(NEEDED)
        Rule.objects.bulk_create(
            unsaved(f"r{n}", kinds[n % len(kinds)], key_kind=("user", "api_key", "account", "ip", "global")[n % 5])
            for n in range(MAX_LIMITS)
        )
        answer = check(WHO)
        assert answer.decision is not None
        assert (answer.allowed, len(answer.decision.standings)) == (True, MAX_LIMITS)

    def test_names_that_redis_would_not_tell_apart_are_the_failure_policys_too(self, check: Check) -> None:
        # Both have the same crc32.
        Rule.objects.bulk_create(unsaved(name, on_failure="deny") for name in ("plumless", "buckeroo"))
        assert check(WHO).unavailable

    def test_a_block_among_them_holds(self, check: Check) -> None:
        Rule.objects.bulk_create(unsaved(f"r{n}", on_failure="allow") for n in range(MAX_LIMITS))
        Rule.objects.bulk_create([unsaved("closed", capacity=0)])
        answer = check(WHO)
        assert (answer.allowed, answer.retry_after) == (False, None)
