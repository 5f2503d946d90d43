from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
from django.db import connection, connections, transaction

from ratelimits import rules
from ratelimits.identity import Identity
from ratelimits.models import Account, ConfigVersion, KeyOverride, Plan, PlanMembership, Rule
from ratelimits.models.keys import key_shard
from ratelimits.rules.loader import Loader
from ratelimits.rules.query_thread import RulesUnavailable
from tests.rules.conftest import Clock
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

USER = Identity(user="user:1")
OTHER = Identity(user="user:2")


def shown(snapshot: rules.Snapshot, identity: Identity = USER) -> dict[str, int | float]:
    """Return the limit of every rule that applies."""
    return {one.name: one.algorithm.shown_limit for one in snapshot.applicable("*", "GET", identity)}


class TestIsolation:
    def test_an_uncommitted_edit_is_not_seen_and_a_committed_one_is(self, loader: Loader) -> None:
        rule(capacity=10)
        with transaction.atomic():
            Rule.objects.update(capacity=20)
            snapshot = loader.reload()
            assert (snapshot.version, shown(snapshot)) == (1, {"burst": 10})
        snapshot = loader.reload()
        assert (snapshot.version, shown(snapshot)) == (2, {"burst": 20})

    def test_a_request_in_an_old_transaction_gets_the_new_rules(self, loader: Loader) -> None:
        rule(capacity=10)
        loader.current()

        def edit() -> None:
            try:
                Rule.objects.update(capacity=20)
            finally:
                connection.close()

        if connection.vendor == "postgresql":
            with transaction.atomic():
                with connection.cursor() as cursor:
                    cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
                assert Rule.objects.get().capacity == 10
                editor = threading.Thread(target=edit)
                editor.start()
                editor.join()
                assert Rule.objects.get().capacity == 10
                assert shown(loader.reload()) == {"burst": 20}
        else:
            # SQLite's transactions begin with the write lock here, so nobody can edit at the same time.
            edit()
            with transaction.atomic():
                assert shown(loader.reload()) == {"burst": 20}

    def test_it_leaves_the_callers_connection_alone(
        self, loader: Loader, django_assert_num_queries: Callable[[int], Any]
    ) -> None:
        rule()
        with django_assert_num_queries(0):
            shown(loader.current())

    def test_what_an_editor_commits_between_version_and_rows_is_read_again(
        self, loader: Loader, queries: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rule(capacity=10)
        read = ConfigVersion.read
        edits = iter([True])

        def read_and_be_overtaken(using: str) -> tuple[int, int]:
            found = read(using)
            if threading.current_thread().name.startswith("ratelimits-rules") and next(edits, False):
                editor = threading.Thread(target=edit)
                editor.start()
                editor.join()
            return found

        def edit() -> None:
            try:
                Rule.objects.update(capacity=20)
            finally:
                connection.close()

        monkeypatch.setattr(ConfigVersion, "read", read_and_be_overtaken)
        snapshot = loader.current()
        assert (snapshot.version, shown(snapshot)) == (2, {"burst": 20})


class TestQueries:
    def test_a_function_of_another_room_reads_in_the_thread(self, loader: Loader, queries: list[str]) -> None:
        rule()
        assert loader.query(Rule.objects.count) == 1
        assert asyncio.run(loader.aquery(Rule.objects.count)) == 1
        assert len([sql for sql in queries if 'FROM "ratelimits_rule"' in sql]) == 2

    def test_its_error_reaches_whoever_asked(self, loader: Loader) -> None:
        known = loader.current()
        with pytest.raises(KeyError, match="typo"):
            loader.query(lambda: {"name": 1}["typo"])
        with pytest.raises(RulesUnavailable, match=r"cannot be read from the database 'default': .*no_table"):
            loader.query(lambda: list(Rule.objects.raw("SELECT * FROM no_table")))
        assert loader.current() is known


class TestReloading:
    def test_a_reload_reads_only_what_changed(self, loader: Loader, queries: list[str]) -> None:
        for number in range(5):
            rule(f"r{number}")
        loader.current()
        Rule.objects.filter(name="r3").update(capacity=20)
        del queries[:]
        assert shown(loader.reload())["r3"] == 20
        [rules_read] = [sql for sql in queries if 'FROM "ratelimits_rule"' in sql]
        assert 'WHERE "ratelimits_rule"."version" >' in rules_read

    def test_a_reload_without_an_edit_is_one_query_and_keeps_the_snapshot(
        self, loader: Loader, queries: list[str]
    ) -> None:
        rule()
        snapshot = loader.current()
        del queries[:]
        assert loader.reload() is snapshot
        assert len([sql for sql in queries if sql.startswith("SELECT")]) == 1

    def test_what_was_deleted_is_gone(self, loader: Loader) -> None:
        plan = Plan.objects.create(name="pro", slug="pro")
        row, own = rule("a", capacity=1), rule("b", plan=plan, capacity=2)
        override = KeyOverride.objects.create(key="user:1", rule="a", capacity=3)
        membership = PlanMembership.objects.create(key="user:1", plan=plan)
        account = Account.objects.create(identifier="1", plan=plan)
        member = Identity(user="user:2", account="account:1")
        assert shown(loader.current()) == {"a": 3, "b": 2}
        assert shown(loader.current(), member) == {"a": 1, "b": 2}
        override.delete()
        assert shown(loader.reload()) == {"a": 1, "b": 2}
        membership.delete()
        assert shown(loader.reload()) == {"a": 1}
        account.delete()
        assert shown(loader.reload(), member) == {"a": 1}
        row.delete()
        own.delete()
        assert shown(loader.reload()) == {}

    def test_a_row_that_turns_to_another_key_leaves_the_first(self, loader: Loader) -> None:
        rule(capacity=1)
        KeyOverride.objects.create(key="user:1", rule="burst", capacity=2)
        loader.current()
        assert (shown(loader.current(), USER), shown(loader.current(), OTHER)) == ({"burst": 2}, {"burst": 1})
        KeyOverride.objects.update(key="user:2")
        assert key_shard("user:1") != key_shard("user:2")
        assert (shown(loader.reload(), USER), shown(loader.reload(), OTHER)) == ({"burst": 1}, {"burst": 2})

    def test_a_rule_that_moves_to_a_plan_leaves_the_default(self, loader: Loader) -> None:
        plan = Plan.objects.create(name="pro", slug="pro")
        PlanMembership.objects.create(key="user:2", plan=plan)
        rule(capacity=1)
        assert shown(loader.current()) == {"burst": 1}
        Rule.objects.update(plan=plan)
        assert (shown(loader.reload(), USER), shown(loader.reload(), OTHER)) == ({}, {"burst": 1})

    def test_a_rule_that_is_made_again_is_there_again(self, loader: Loader) -> None:
        rule(capacity=1).delete()
        rule(capacity=2)
        assert shown(loader.current()) == {"burst": 2}
        Rule.objects.get().delete()
        rule(capacity=3)
        assert shown(loader.reload()) == {"burst": 3}

    def test_a_database_that_went_back_is_read_whole(self, loader: Loader) -> None:
        rule(capacity=1)
        rule("other")
        loader.current()
        Rule.objects.filter(name="other").delete()
        loader.reload()
        ConfigVersion.objects.update(version=1)
        assert (loader.reload().version, shown(loader.reload())) == (1, {"burst": 1})

    def test_a_redis_that_is_ahead_of_the_database_is_said_once(
        self, loader: Loader, caplog: pytest.LogCaptureFixture
    ) -> None:
        rule(capacity=1)
        for _again in range(3):
            assert loader.reload(9).version == 1
        [record] = [record for record in caplog.records if record.name == "ratelimits.rules.loader"]
        expected = "Redis has version 9 of the rules, but the database 'default' has only version 1"
        assert expected in record.getMessage()

    def test_a_minimum_that_is_held_asks_nothing(self, loader: Loader, queries: list[str]) -> None:
        rule()
        snapshot = loader.current()
        del queries[:]
        assert loader.reload(snapshot.version) is snapshot
        assert queries == []

    def test_many_that_are_stale_at_once_make_one_reload(self, loader: Loader, queries: list[str]) -> None:
        rule(capacity=1)
        loader.current()
        Rule.objects.update(capacity=2)
        del queries[:]
        start = threading.Barrier(8)
        seen: list[rules.Snapshot] = []

        def ask() -> None:
            start.wait()
            seen.append(loader.reload(2))

        threads = [threading.Thread(target=ask) for _number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {id(snapshot) for snapshot in seen} == {id(loader.current())}
        assert len([sql for sql in queries if 'FROM "ratelimits_rule"' in sql]) == 1


class TestShards:
    def test_a_shard_is_read_whole_on_first_touch_and_never_again(self, loader: Loader, queries: list[str]) -> None:
        rule()
        KeyOverride.objects.create(key="user:1", rule="burst", capacity=2)
        alike = next(f"user:{n}" for n in range(10, 1000) if key_shard(f"user:{n}") == key_shard("user:1"))
        snapshot = loader.current()
        assert not any("keyoverride" in sql for sql in queries)
        assert shown(snapshot) == {"burst": 2}
        assert len([sql for sql in queries if 'FROM "ratelimits_keyoverride"' in sql]) == 1
        del queries[:]
        for _again in range(3):
            assert shown(snapshot, Identity(user=alike)) == {"burst": 10}
            assert shown(snapshot) == {"burst": 2}
        assert queries == []

    def test_invented_keys_cost_no_query_once_the_shards_are_read(self, loader: Loader, queries: list[str]) -> None:
        rule()
        snapshot = loader.current()
        for number in range(600):
            snapshot.select("*", "GET", Identity(user=f"user:{number}"))
        del queries[:]
        for number in range(5000):
            snapshot.select("*", f"M{number}", Identity(api_key=f"api_key:invented-{number}", address="ip:1.2.3.4"))
        assert queries == []
        assert len(snapshot._selections) == 2

    def test_the_shards_of_one_request_are_read_together(self, loader: Loader, queries: list[str]) -> None:
        rule()
        snapshot = loader.current()
        del queries[:]
        identity = Identity(user="user:1", api_key="api_key:2", account="account:3", address="ip:203.0.113.4")
        snapshot.select("*", "GET", identity)
        assert len([sql for sql in queries if 'FROM "ratelimits_keyoverride"' in sql]) == 1
        assert not snapshot.missing(identity)

    def test_a_shard_is_never_newer_than_the_rules_beside_it(self, loader: Loader) -> None:
        rule(capacity=1)
        old = loader.current()
        with transaction.atomic():
            Rule.objects.update(capacity=2)
            KeyOverride.objects.create(key="user:1", rule="burst", rate=50)
        selection = old.select("*", "GET", USER)
        assert selection.version == loader.current().version == 3
        assert (old.version, selection.rules[0].algorithm.shown_limit) == (1, 2)

    def test_edits_reach_the_shards_that_are_held(self, loader: Loader, queries: list[str]) -> None:
        rule(capacity=1)
        assert shown(loader.current()) == {"burst": 1}
        KeyOverride.objects.create(key="user:1", rule="burst", capacity=2)
        KeyOverride.objects.create(key="user:2", rule="burst", capacity=3)
        assert shown(loader.reload()) == {"burst": 2}
        assert shown(loader.current(), OTHER) == {"burst": 3}


class TestTime:
    def test_the_rules_are_read_again_after_the_interval(self, loader: Loader, clock: Clock) -> None:
        rule(capacity=1)
        shown(loader.current())
        Rule.objects.update(capacity=2)
        clock.seconds += 29.9
        assert shown(loader.current()) == {"burst": 1}
        clock.seconds += 0.1
        assert shown(loader.current()) == {"burst": 1}
        loader.reload(0)  # after the one that was started
        assert shown(loader.current()) == {"burst": 2}

    def test_between_the_intervals_nothing_is_asked(self, loader: Loader, clock: Clock, queries: list[str]) -> None:
        rule()
        shown(loader.current())
        del queries[:]
        for _step in range(100):
            clock.seconds += 0.25
            shown(loader.current())
        assert queries == []


class TestWithoutADatabase:
    @pytest.fixture
    def away(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
        from django.db import OperationalError

        read = ConfigVersion.read
        gone = True

        def refuse(using: str) -> tuple[int, int]:
            if gone:
                raise OperationalError("connection refused")
            return read(using)

        monkeypatch.setattr(ConfigVersion, "read", refuse)

        def switch(away: bool) -> None:
            nonlocal gone
            gone = away

        return switch

    def test_nothing_held_is_a_clear_error(self, loader: Loader, away: Callable[[bool], None]) -> None:
        with pytest.raises(RulesUnavailable, match="connection refused; is it up"):
            loader.current()

    def test_it_is_left_alone_for_a_second(self, loader: Loader, clock: Clock, away: Callable[[bool], None]) -> None:
        with pytest.raises(RulesUnavailable):
            loader.current()
        away(False)
        with pytest.raises(RulesUnavailable, match="connection refused"):
            loader.current()
        clock.seconds += 1
        assert loader.current().version == 0

    def test_what_is_held_stays_in_force(
        self,
        loader: Loader,
        clock: Clock,
        away: Callable[[bool], None],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        away(False)
        rule(capacity=1)
        assert shown(loader.current()) == {"burst": 1}
        away(True)
        clock.seconds += 31
        assert shown(loader.current()) == {"burst": 1}
        with pytest.raises(RulesUnavailable):
            loader.reload()
        assert shown(loader.current()) == {"burst": 1}
        loader._thread.submit(int).result()  # after the refresh, whose failure the reload may already have seen
        assert "the current ones stay in force" in caplog.text


class TestPatience:
    @pytest.fixture(params=["sync", "async"])
    def ask(self, request: pytest.FixtureRequest, loader: Loader) -> Callable[[], rules.Snapshot]:
        return loader.current if request.param == "sync" else lambda: asyncio.run(loader.acurrent())

    def test_a_thread_that_gets_no_turn_is_not_a_database_that_does_not_answer(
        self, loader: Loader, ask: Callable[[], rules.Snapshot], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        rule(capacity=1)
        turn = threading.Event()
        loader._thread.submit(turn.wait)
        with ThreadPoolExecutor(1) as others:
            try:
                with monkeypatch.context() as impatient:
                    impatient.setattr("ratelimits.rules.query_thread.PATIENCE", 0.02)
                    asked = others.submit(ask)
                    assert not wait([asked], timeout=0.2).done
            finally:
                turn.set()
            assert shown(asked.result()) == {"burst": 1}

    def test_a_database_that_does_not_answer_is_given_up(
        self, loader: Loader, ask: Callable[[], rules.Snapshot], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        answer, read = threading.Event(), ConfigVersion.read

        def slowly(using: str) -> tuple[int, int]:
            with connections[using].execute_wrapper(lambda execute, *query: answer.wait() and execute(*query)):
                return read(using)

        monkeypatch.setattr(ConfigVersion, "read", slowly)
        monkeypatch.setattr("ratelimits.rules.query_thread.PATIENCE", 0.02)
        try:
            with pytest.raises(RulesUnavailable, match="the database did not answer within"):
                ask()
        finally:
            answer.set()
            loader._thread.submit(int).result()


class TestAsync:
    def test_async_code_reads_rules_and_shards_without_blocking_its_loop(self) -> None:
        rule(capacity=1)
        KeyOverride.objects.create(key="user:1", rule="burst", capacity=2)

        async def ask() -> tuple[int | float, int]:
            rules.forget()
            snapshot = await rules.acurrent()
            selection = await rules.aselect(snapshot, "*", "GET", USER)
            return selection.rules[0].algorithm.shown_limit, (await rules.areload()).version

        assert asyncio.run(ask()) == (2, 2)


def test_the_process_holds_one_snapshot_and_forgets_it_with_the_database(settings: Any, django_db_blocker: Any) -> None:
    rules.forget()
    rule()
    snapshot = rules.current()
    assert rules.current() is snapshot
    settings.RATELIMITS = {**settings.RATELIMITS, "FAILURE_POLICY": "deny"}
    assert rules.current().applicable("*", "GET", USER)[0].on_failure == "deny"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_reads_for_itself(loader: Loader) -> None:
    rule(capacity=1)
    shown(loader.current())
    Rule.objects.update(capacity=2)
    connection.close()
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(shown(loader.reload())["burst"]).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 10) == b"2"
    os.close(reader)
    os.close(writer)
