from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
import redis
from django.db import connection
from django.test import override_settings
from django.utils import timezone

from ratelimits import moments
from ratelimits.billing import jobs as billing
from ratelimits.billing import tasks as billing_tasks
from ratelimits.billing.models import PushDelivery, PushReceiver, Report
from ratelimits.conf import conf
from ratelimits.doctor.findings import Part, ServerFinding
from ratelimits.doctor.properties import properties
from ratelimits.models import ConfigVersion, Customer, KeyOverride, Rule
from ratelimits.status.fact import Fact, Level, worst
from ratelimits.status.facts import facts
from ratelimits.status.redis_state import RedisReading, RedisState, ServerState
from ratelimits.usage import tasks
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.models import Alert, AlertDelivery, DurabilityGap, QuarantinedBatch, ShardState, TaskRun
from ratelimits.usage.status.facts import ago
from tests.support.entry_points import away
from tests.support.plain import PLAIN
from tests.support.raw import RawRedis
from tests.support.restricted import USER, restricted
from tests.support.rows import rule, unsaved
from tests.support.usage.traffic import use

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]

SAID = properties(
    {
        "redis_version": "7.2.4",
        "used_memory": 2**20,
        "maxmemory_policy": "noeviction",
        "aof_enabled": 1,
        "aof_last_write_status": "ok",
    }
)
LOSES = ServerFinding("replay", frozenset({Part.BILLS}), "A restart throws away what was written", "Give rights")


def healthy(
    *, version: int = 0, opened: int = 0, sealed: int = 0, loses: ServerFinding | None = None, **said: Any
) -> ServerState:
    """Return the state of a healthy server, except for these values."""
    return ServerState(replace(SAID, **said), version, opened, sealed, loses=loses)


def found() -> dict[str, Fact]:
    return {fact.name: fact for fact in facts()}


def test_more_rules_than_one_decision_takes_are_a_red_fact_with_what_switches_them_on() -> None:
    Rule.objects.bulk_create(unsaved(f"r{n}") for n in range(120))
    rule("more", mode="off", scope="search")
    assert "crowding" not in found()
    KeyOverride.objects.create(key="user:1", rule="more", mode="enforce")
    fact = found()["crowding"]
    assert (fact.level, fact.word) == (Level.RED, "121 for one request, at most 120 are decided")
    assert fact.detail.startswith("Scope search. ")
    assert fact.detail.endswith("Overrides of these keys switch some of the rules on: user:1.")


def run_all() -> None:
    """Run each task once, as a worker does."""
    tasks.seal()
    tasks.drain()
    billing_tasks.finalise()


@pytest.fixture
def answer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Fact]]:
    """Return the facts for a server whose state differs from that of a healthy one."""

    def with_state(**values: Any) -> dict[str, Fact]:
        state = RedisState((healthy(**values),), 0, "", 0.001)
        monkeypatch.setattr(RedisReading, "state", lambda _reading: state)
        return found()

    return with_state


def test_all_is_green_while_a_worker_runs() -> None:
    rule(bills=True)
    use(now=None, configuration=ConfigVersion.read("default")[0])
    run_all()
    levels = {name: fact.level for name, fact in found().items()}
    assert levels == dict.fromkeys(levels, Level.GREEN)
    assert len(levels) == 18
    assert worst(facts()) is Level.GREEN


def test_before_anything_ran_only_those_who_bill_are_warned() -> None:
    names = {"watermark", "seal", "drain", "finalise"}
    assert {found()[name].level for name in names} == {Level.UNKNOWN}
    rule(bills=True)
    assert {found()[name].level for name in names} == {Level.AMBER}
    assert worst(facts()) is Level.AMBER


def test_without_redis_it_is_said_which_policy_decides_and_what_nobody_knows(settings: Any) -> None:
    rule("api", on_failure="deny")
    rule("gone", mode="off", on_failure="local")
    away(settings, 1)
    now = found()
    assert (now["redis"].level, now["redis"].word) == (Level.RED, "does not answer")
    assert "ConnectionError" in now["redis"].detail
    assert (now["failure"].level, now["failure"].word) == (Level.RED, "active: allow")
    assert now["failure"].detail == "Rules with a policy of their own: deny: 1."
    unknown = {name for name, fact in now.items() if fact.word == "unknown"}
    assert unknown == {"memory", "eviction", "aof", "open", "sealed"}
    assert now["configuration"].level is Level.UNKNOWN


def test_it_is_said_since_when_no_worker_was_seen() -> None:
    rule(bills=True)
    run_all()
    gone = moments.now() - timedelta(hours=2)
    TaskRun.objects.update(succeeded_at=gone)
    for name in ("seal", "drain"):
        assert f"No worker has been seen since {gone:%Y-%m-%d %H:%M:%S} UTC." in found()[name].detail
        assert f"Without Celery, let cron run ratelimits_{name}." in found()[name].detail
    TaskRun.objects.filter(task="drain").update(failed_at=timezone.now())
    assert "No worker" not in found()["seal"].detail, "a worker fails, but runs"


def test_a_server_that_loads_its_data_is_recovering(monkeypatch: pytest.MonkeyPatch) -> None:
    state = RedisState((), 1, "BusyLoadingError: Redis is loading the dataset in memory", 0.001)
    monkeypatch.setattr(RedisReading, "state", lambda _reading: state)
    fact = found()["redis"]
    assert (fact.level, fact.word) == (Level.RED, "recovering: it loads its data")


def test_the_database_is_queried_while_redis_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    begin, state = RedisReading.__init__, RedisReading.state

    def noted(name: str, method: Callable[[RedisReading], Any]) -> Callable[[RedisReading], Any]:
        def call(reading: RedisReading) -> Any:
            events.append(name)
            return method(reading)

        return call

    def query(execute: Callable[..., Any], *args: Any) -> Any:
        events.append("query")
        return execute(*args)

    monkeypatch.setattr(RedisReading, "__init__", noted("begin", begin))
    monkeypatch.setattr(RedisReading, "state", noted("state", state))
    with connection.execute_wrapper(query):
        facts()
    assert events == ["begin", *["query"] * (len(events) - 2), "state"]
    assert len(events) > 5


def test_one_of_several_servers_that_is_silent_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    state = RedisState((healthy(), healthy()), 1, "TimeoutError: x", 0.25)
    monkeypatch.setattr(RedisReading, "state", lambda _reading: state)
    assert found()["redis"].word == "1 of 3 servers do not answer"
    assert found()["memory"].level is Level.GREEN


@pytest.mark.parametrize(
    ("values", "name", "level", "word"),
    [
        ({"memory": 79 * 2**20, "max_memory": 100 * 2**20}, "memory", Level.GREEN, "79.0 MiB of 100.0 MiB (79 %)"),
        ({"memory": 80 * 2**20, "max_memory": 100 * 2**20}, "memory", Level.AMBER, "80.0 MiB of 100.0 MiB (80 %)"),
        ({"memory": 89 * 2**20, "max_memory": 100 * 2**20}, "memory", Level.AMBER, "89.0 MiB of 100.0 MiB (89 %)"),
        ({"memory": 90 * 2**20, "max_memory": 100 * 2**20}, "memory", Level.RED, "90.0 MiB of 100.0 MiB (90 %)"),
        ({"policy": "allkeys-lru"}, "eviction", Level.AMBER, "allkeys-lru"),
        ({"aof": False}, "aof", Level.AMBER, "off"),
        ({"aof_written": False}, "aof", Level.RED, "not written"),
        ({"loses": LOSES}, "aof", Level.AMBER, "lost at a restart"),
        ({"sealed": 10 * conf.SHARDS}, "sealed", Level.GREEN, f"{10 * conf.SHARDS}"),
        ({"sealed": 10 * conf.SHARDS + 1}, "sealed", Level.AMBER, f"{10 * conf.SHARDS + 1}"),
    ],
)
def test_what_a_server_says_has_a_level(
    answer: Callable[..., dict[str, Fact]], values: dict[str, Any], name: str, level: Level, word: str
) -> None:
    fact = answer(**values)[name]
    assert (fact.level, fact.word) == (level, word)
    assert bool(fact.detail) == (level is not Level.GREEN)


def test_what_endangers_usage_is_red_where_rules_bill(answer: Callable[..., dict[str, Fact]]) -> None:
    rule(bills=True)
    assert answer(policy="allkeys-lru")["eviction"].level is Level.RED
    assert answer(aof=False)["aof"].level is Level.RED
    assert answer(loses=LOSES)["aof"].level is Level.RED
    with override_settings(RATELIMITS={**PLAIN, "FENCE": "none"}):
        assert answer(aof=False)["aof"].level is Level.AMBER


def test_an_edit_that_was_not_published_and_a_database_that_was_restored_are_told_apart(
    answer: Callable[..., dict[str, Fact]],
) -> None:
    rule()
    version = ConfigVersion.read("default")[0]
    for in_redis, level in (
        (0, Level.GREEN),
        (version, Level.GREEN),
        (version - 1, Level.AMBER if version > 1 else Level.GREEN),
        (version + 1, Level.RED),
    ):
        assert answer(version=in_redis)["configuration"].level is level
    assert "ratelimits_reload" in answer(version=version + 1)["configuration"].detail


@pytest.fixture
def _every_minute(settings: Any) -> None:
    """Seal every minute, as by default; the demo seals every second."""
    settings.RATELIMITS = {**settings.RATELIMITS, "SEAL_INTERVAL": 60}


@pytest.mark.usefixtures("_every_minute")
def test_the_watermark_is_that_of_the_shard_that_is_furthest_behind() -> None:
    run_all()
    assert found()["watermark"].level is Level.GREEN
    for minutes, level in ((2, Level.GREEN), (4, Level.AMBER), (11, Level.RED)):
        ShardState.objects.filter(shard=3).update(watermark=(time.time() - minutes * 60) * 1_000_000)
        assert found()["watermark"].level is level
    ShardState.objects.filter(shard=3).delete()
    assert found()["watermark"].word == "never"
    ShardState.objects.filter(shard=4).update(ahead=90_000_000)
    assert (found()["watermark"].level, found()["watermark"].word) == (Level.RED, "clock ahead by 90 s")


def test_batches_that_wait_and_those_in_quarantine_are_counted(redis_client: RawRedis) -> None:
    use("acme")
    seal()
    use("acme")
    QuarantinedBatch.objects.create(shard=1, name="a:1", content="1")
    QuarantinedBatch.objects.create(shard=1, name="a:2", content="2", resolved_at=timezone.now())
    now = found()
    assert [now[name].word for name in ("open", "sealed", "quarantine")] == ["1", "1", "1"]
    assert now["quarantine"].level is Level.RED
    assert (now["quarantine"].model, now["quarantine"].query) == ("quarantinedbatch", {"resolved_at__isempty": "1"})


def test_gaps_are_amber_for_a_day_and_counted_for_a_month() -> None:
    for number, (days, recovered) in enumerate([(0, False), (0, True), (2, False), (40, False)]):
        gap = DurabilityGap.objects.create(event=f"x{number}", kind="wipe", since=1, until=2)
        now = timezone.now()
        DurabilityGap.objects.filter(pk=gap.pk).update(
            declared_at=now - timedelta(days=days), recovered_at=now if recovered else None
        )
    assert (found()["gaps"].level, found()["gaps"].word) == (Level.AMBER, "2 in 30 days")
    DurabilityGap.objects.filter(event="x0").delete()
    assert (found()["gaps"].level, found()["gaps"].word) == (Level.GREEN, "1 in 30 days")


def test_more_rows_than_anybody_counts_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratelimits.usage.status.facts._MAX_COUNT", 2)
    for number in range(4):
        DurabilityGap.objects.create(event=f"x{number}", kind="wipe", since=1, until=2)
        QuarantinedBatch.objects.create(shard=1, name=f"a:{number}", content="1")
    assert found()["gaps"].word == "more than 2 in 30 days"
    assert found()["quarantine"].word == "more than 2"


def test_deliveries_that_failed_are_counted() -> None:
    acme = Customer.objects.create()
    alert = Alert.objects.create(
        id=UUID(int=1),
        customer=acme,
        account="acme",
        meter="requests",
        rule=0,
        period=1,
        period_end=2,
        threshold=80,
        used=1,
        quantity=1,
    )
    for number, state in enumerate(("failed", "failed", "waiting", "done")):
        AlertDelivery.objects.create(id=UUID(int=number), alert=alert, kind="email", state=state, due_at=timezone.now())
    report = Report.objects.create(customer=acme, account="acme", period_start=1, period_end=2, timezone="UTC")
    receiver = PushReceiver.objects.create(name="stripe")
    for number, state in enumerate(("refused", "unsure", "expired", "waiting", "accepted", "skipped")):
        PushDelivery.objects.create(
            receiver=receiver,
            report=report,
            line_id=f"x{number}",
            state=state,
            meter="requests",
            overage=1,
            together=1,
            happened_at=timezone.now(),
            due_at=timezone.now(),
        )
    now = found()
    assert (now["alerts"].level, now["alerts"].word) == (Level.AMBER, "2")
    assert (now["push"].level, now["push"].word) == (Level.AMBER, "3")
    AlertDelivery.objects.update(due_at=timezone.now() - timedelta(days=31))
    assert found()["alerts"].level is Level.GREEN


@pytest.mark.usefixtures("_every_minute")
def test_a_task_that_is_late_or_fails_is_said() -> None:
    now = timezone.now()
    for seconds, level in ((1, Level.GREEN), (181, Level.AMBER), (601, Level.RED)):
        TaskRun.objects.update_or_create(task="seal", defaults={"succeeded_at": now - timedelta(seconds=seconds)})
        assert found()["seal"].level is level
    advice = "Without Celery, let cron run ratelimits_drain, and set DRAIN_INTERVAL to the seconds between two runs."
    TaskRun.objects.update_or_create(task="seal", defaults={"succeeded_at": now})
    TaskRun.objects.update_or_create(task="drain", defaults={"succeeded_at": now - timedelta(seconds=100)})
    assert advice in found()["drain"].detail
    TaskRun.objects.update(succeeded_at=now - timedelta(seconds=5), failed_at=now, error="RedisError: full")
    assert (found()["seal"].level, found()["seal"].detail) == (Level.RED, "The last run failed: RedisError: full")


def test_before_the_first_run_the_facts_say_what_to_start() -> None:
    now = found()
    assert now["watermark"].word == "never"
    assert now["watermark"].detail.startswith("Nothing was drained to the ledger yet")
    start = "Start a Celery worker with the app's beat schedule, or run ratelimits_"
    assert {task: now[task].detail.removeprefix(start) for task in ("seal", "drain", "finalise")} == {
        "seal": "seal.",
        "drain": "drain.",
        "finalise": "finalise. What people finalise in the admin, or for one account, does not count here.",
    }
    run_all()
    assert "Start" not in "".join(fact.detail for fact in found().values())
    ShardState.objects.filter(shard=3).delete()
    assert found()["watermark"].detail == (
        "Is a worker running that seals and drains, or does cron run ratelimits_seal and ratelimits_drain, and is"
        " anything in quarantine?"
    )


def test_a_finalisation_of_one_account_is_not_taken_for_one_of_all_accounts() -> None:
    assert list(billing.finalise("acme")) == []
    fact = found()["finalise"]
    assert (fact.title, fact.word) == ("Last finalisation of all accounts", "never")
    billing_tasks.finalise()
    assert found()["finalise"].word != "never"


def test_a_task_that_never_ran_is_not_due_until_its_interval_has_passed_since_the_first_seal() -> None:
    assert found()["finalise"].word == "never"
    tasks.seal()
    first = TaskRun.objects.get().first_run_at
    assert (found()["finalise"].level, found()["finalise"].word) == (Level.GREEN, "not due yet")
    tasks.seal()
    assert TaskRun.objects.get().first_run_at == first
    for changes in (
        {"first_run_at": timezone.now() - timedelta(seconds=conf.FINALISE_INTERVAL + 1)},
        {"first_run_at": first, "succeeded_at": timezone.now() - timedelta(hours=1)},
        {"first_run_at": first, "succeeded_at": None},
    ):
        TaskRun.objects.update(**changes)
        assert found()["finalise"].word == "never"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0 s ago"), (119, "119 s ago"), (120, "2 min ago"), (7200, "2 h ago"), (200_000, "2 d ago")],
)
def test_an_age_has_the_unit_that_fits(seconds: float, text: str) -> None:
    assert ago(seconds) == text


@pytest.mark.parametrize(
    ("right", "level", "command"), [("-hset", Level.RED, "HSET"), ("-script", Level.AMBER, "SCRIPT LOAD")]
)
def test_a_refused_command_is_named_with_the_right(
    redis_client: redis.Redis, redis_url: str, right: str, level: Level, command: str
) -> None:
    """The command is red if something that the project needs does not work without it."""
    with restricted(redis_client, redis_url, right):
        shown = next(fact for fact in facts(RedisReading(tries=True)) if fact.name == "redis")
    assert (shown.level, shown.word) == (level, f"answers, but refuses {command}")
    assert f"ACL SETUSER {USER} +{command.lower().replace(' ', '|')}" in shown.detail
