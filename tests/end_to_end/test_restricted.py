"""Test the app on servers that refuse some commands or hide some fields, as hosted servers do."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings
from django.core import checks
from django.test import override_settings
from redis.exceptions import ResponseError

from ratelimits import engine
from ratelimits.billing.reports.gaps import describe
from ratelimits.billing.reports.verify.printed import verify_printed
from ratelimits.embedded import EmbeddedServer
from ratelimits.engine.server import current_server, publish_version
from ratelimits.engine.transport.connection import UNREADABLE, read_run
from ratelimits.simulate.trial import try_rule
from ratelimits.status.fact import Level
from ratelimits.status.facts import facts
from ratelimits.status.redis_state import RedisReading
from ratelimits.usage.ledger.fence import NotFencedError
from ratelimits.usage.models import Batch, DurabilityGap, Line
from tests.support.engine.asking import NOW, limit
from tests.support.engine.proxy import Proxy
from tests.support.eventually import until
from tests.support.reports.invoices import close, spend
from tests.support.restricted import USER, reached_by, restricted
from tests.support.rows import rule
from tests.support.servers import TestServers, server_binary
from tests.support.usage.traffic import flow, use

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]

FIVE: dict[str, Any] = {"capacity": 5, "period": 3600}


def admitted(decide: Callable[..., Any], number: int = 8, key: str = "user:1") -> list[bool]:
    return [decide([limit("token_bucket", key, **FIVE)]).allowed for _ in range(number)]


def adecide(limits: list[engine.Limit]) -> engine.Decision:
    return asyncio.run(engine.adecide(limits))


ONLY_FIVE = [True] * 5 + [False] * 3


@pytest.mark.parametrize("decide", [engine.decide, adecide])
def test_a_user_without_info_is_limited_and_counted(
    redis_client: redis.Redis, redis_url: str, decide: Callable[..., Any]
) -> None:
    with restricted(redis_client, redis_url, "-info"):
        assert admitted(decide) == ONLY_FIVE
        assert read_run(current_server().wire.client) == UNREADABLE


@pytest.mark.parametrize("decide", [engine.decide, adecide])
def test_a_user_who_cannot_load_scripts_is_limited_after_a_flush(
    redis_client: redis.Redis, redis_url: str, decide: Callable[..., Any]
) -> None:
    # Redis 6.2 cannot take a part of a command away.
    with restricted(redis_client, redis_url, "-script"):
        for key in ("user:1", "user:2"):
            redis_client.script_flush()
            assert admitted(decide, key=key) == ONLY_FIVE


def test_many_tasks_at_once_cannot_load_scripts_either(redis_client: redis.Redis, redis_url: str) -> None:
    async def together() -> list[bool]:
        one = limit("token_bucket", "user:1", **FIVE)
        return [each.allowed for each in await asyncio.gather(*(engine.adecide([one]) for _ in range(40)))]

    with restricted(redis_client, redis_url, "-script"):
        redis_client.script_flush()
        assert sum(asyncio.run(together())) == 5


def test_a_proxy_that_hides_the_run_from_info_hides_it_from_nobody(servers: TestServers) -> None:
    with Proxy(servers.redis.port) as proxy, reached_by(proxy.url):
        proxy.replaced = {b"run_id:": b"hidden:"}
        use()
        assert flow().batches == 1
        use()
        assert flow().batches == 1
    assert DurabilityGap.objects.count() == 0


def test_the_app_asks_on_when_its_server_refuses_info(redis_client: redis.Redis, redis_url: str) -> None:
    """The breaker of a process must close again also where INFO is refused."""
    with restricted(redis_client, redis_url, "-info"):
        current_server().wire.probe()


def test_many_commands_at_once_need_no_loading(redis_client: redis.Redis, redis_url: str) -> None:
    rule = engine.algorithm_from_json({"algorithm": "token_bucket", "capacity": 10, "rate": 5, "period": 1})
    with restricted(redis_client, redis_url, "-script"):
        redis_client.script_flush()
        bursts, _overload = try_rule(current_server().wire, rule, None, NOW)
    assert (bursts.requested, bursts.admitted) == (120, 35)


def test_usage_of_a_user_without_info_is_billed_under_a_named_promise(
    redis_client: redis.Redis, redis_url: str
) -> None:
    with restricted(redis_client, redis_url, "-info", "-config"):
        use()
        with pytest.raises(NotFencedError, match=r"INFO.*\+info.*RATELIMITS\['FENCE'\]"):
            flow()
        window = override_settings(RATELIMITS={**settings.RATELIMITS, "FENCE": "window"})
        with window, pytest.raises(NotFencedError, match=r"run cannot be read.*\+info"):
            flow()
        with override_settings(RATELIMITS={**settings.RATELIMITS, "FENCE": "durable"}):
            assert flow().batches == 1
    assert Batch.objects.get().fence == "durable+run-unreadable"
    assert f"{PROMISE}durable+run-unreadable" in map(describe, DurabilityGap.objects.all())


#: How a report prints a promise, without its name.
PROMISE = "fence 2026-11-21T00:00:00Z/2026-11-30T23:59:59.999999Z fence="
FENCES: dict[str, tuple[dict[str, Any], str]] = {
    "window": ({"FENCE_WINDOW": 0.01}, "window-0.01s"),
    "durable": ({}, "durable"),
    "none": ({}, "none"),
}


@pytest.mark.parametrize("fence", FENCES)
def test_a_user_without_config_has_an_honest_fence(redis_client: redis.Redis, redis_url: str, fence: str) -> None:
    more, name = FENCES[fence]
    with restricted(redis_client, redis_url, "-config"):
        use()
        with pytest.raises(NotFencedError, match=r"CONFIG GET.*\+config\|get.*RATELIMITS\['FENCE'\]"):
            flow()
        with override_settings(RATELIMITS={**settings.RATELIMITS, "FENCE": fence, **more}):
            spend("acme", "2026-11-21T12:00")
            (report,) = close("2026-12-02")
    assert set(Batch.objects.values_list("fence", flat=True)) == {name}
    assert report.gaps.split("; ").count(f"{PROMISE}{name}") == 1
    assert list(verify_printed("default")) == []


@pytest.mark.parametrize(("fence", "command"), [("waitaof", "WAITAOF"), ("aof", "CONFIG GET"), ("aof", "INFO")])
def test_a_right_of_the_fence_is_taken_away_while_the_worker_runs(
    redis_client: redis.Redis, redis_url: str, servers: TestServers, fence: str, command: str
) -> None:
    """Nothing is written to the ledger until the right is back. Then all of it is, once."""
    if fence == "waitaof" and servers.redis_kind == "redis6":
        return  # it has no WAITAOF: tests/usage/ledger/test_fence.py
    rule("monthly", bills=True)
    words = (command, f"ACL SETUSER {USER} +{command.lower().replace(' ', '|')}", f"['FENCE'] is \"{fence}\"")
    with override_settings(RATELIMITS={**settings.RATELIMITS, "FENCE": fence}), restricted(redis_client, redis_url):
        use()
        assert flow().batches == 1
        redis_client.execute_command("ACL", "SETUSER", USER, f"-{command.split()[0].lower()}")
        use()
        for _ in range(2):
            with pytest.raises(NotFencedError, match=command):
                flow()
            use()
        message = found()["E047"]
        assert [word for word in words if word not in message] == []
        assert (Batch.objects.count(), Line.objects.count()) == (1, 1)
        redis_client.execute_command("ACL", "SETUSER", USER, f"+{command.split()[0].lower()}")
        flow()
        assert "E047" not in found()
    assert sum(Line.objects.values_list("admitted_requests", flat=True)) == 4
    assert not Line.objects.exclude(batch__fence__in=(fence, "always")).exists()


def found() -> dict[str, str]:
    """Return the messages of the checks of the server, by their ids."""
    texts: dict[str, str] = {}
    for each in checks.run_checks(tags=["ratelimits"], databases=["default"]):
        name = str(each.id).removeprefix("ratelimits.")
        texts[name] = f"{texts.get(name, '')}{each.msg} {each.hint}\n"
    return texts


@pytest.mark.parametrize(
    ("rights", "name", "words"),
    [
        ("-info", "W046", ("may not send INFO", f"ACL SETUSER {USER} +info")),
        ("-info", "E047", ("No usage will be written", "does not allow INFO", f"ACL SETUSER {USER} +info")),
        ("-script", "W046", ("may not send SCRIPT LOAD", f"ACL SETUSER {USER} +script|load")),
        ("-evalsha", "E046", ("may not send EVALSHA", f"ACL SETUSER {USER} +evalsha", "It stops: decide requests")),
        ("-set", "E046", ("may not send SET", f"ACL SETUSER {USER} +set", "It stops: decide requests")),
        ("resetkeys ~rl:1:other:*", "E046", ("Redis keys", f"ACL SETUSER {USER} ~rl:1:test:*")),
        ("-config", "E047", ("CONFIG GET", "+config|get", "RATELIMITS['FENCE']", "window")),
        # Where usage is not counted, nobody tries the fence.
        ("-config -hincrby", "E046", ("may not send CONFIG GET", "RATELIMITS['FENCE']", '"aof"', '"window"')),
    ],
)
def test_a_check_names_what_is_refused_and_the_right(
    redis_client: redis.Redis, redis_url: str, rights: str, name: str, words: tuple[str, ...]
) -> None:
    rule("monthly", bills=True)
    with restricted(redis_client, redis_url, *rights.split()):
        messages = found()
    assert name in messages
    assert [word for word in words if word not in messages[name]] == []


def test_a_user_limited_to_the_namespace_can_do_everything(redis_client: redis.Redis, redis_url: str) -> None:
    rule("monthly", bills=True)
    with restricted(redis_client, redis_url, "resetkeys", "~rl:1:test:*"):
        messages = found()
        assert {name for name in messages if name[1:3] == "04"} == {"W046"}
        assert "~rl:1:simulate-*" in messages["W046"], "only trying a rule before it is saved needs other keys"
        use()
        assert flow().batches == 1


def test_what_cannot_be_read_is_never_shown_as_off(redis_client: redis.Redis, redis_url: str) -> None:
    with restricted(redis_client, redis_url, "-info"):
        shown = {fact.name: fact for fact in facts()}
        messages = found()
    assert (shown["redis"].level, shown["redis"].word) == (Level.AMBER, "answers, but refuses INFO")
    assert "+info" in shown["redis"].detail
    for name in ("aof", "memory", "eviction"):
        assert (shown[name].level, shown[name].word) == (Level.UNKNOWN, "cannot be read")
    assert "W030" not in messages, "nobody knows whether the file is off"
    assert "cannot be read" in messages["W047"]


def test_the_status_page_names_the_other_fences(redis_client: redis.Redis, redis_url: str) -> None:
    with restricted(redis_client, redis_url, "-config"):
        shown = {fact.name: fact for fact in facts(RedisReading(tries=True))}
    assert "+config|get" in shown["redis"].detail
    assert "RATELIMITS['FENCE']" in shown["redis"].detail


def test_a_server_that_can_evict_is_named_also_where_config_is_refused(
    redis_client: redis.Redis, redis_url: str
) -> None:
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    try:
        with restricted(redis_client, redis_url, "-config"):
            assert "allkeys-lru" in found()["W031"]
    finally:
        redis_client.config_set("maxmemory-policy", "noeviction")


def test_replicas_and_other_servers_behind_one_address_are_named(
    servers: TestServers, redis_client: redis.Redis, tmp_path: Path
) -> None:
    binary = server_binary(servers.redis_kind)
    other = EmbeddedServer(tmp_path / "other", aof=True, binary=binary)
    try:
        with redis.Redis(port=other.port) as client, Proxy(servers.redis.port) as proxy, reached_by(proxy.url):
            assert "E048" not in found()
            proxy.in_turn(servers.redis.port, other.port)
            assert "2 different servers" in found()["E048"]
            client.replicaof("127.0.0.1", servers.redis.port)
            until(lambda: client.info("replication")["master_link_status"] == "up", "the replica follows")
            assert re.search(r"leads also to a read-only replica: [34] of 8", found()["E048"])
            proxy.use(other.port)
            assert "is a read-only replica" in found()["E048"]
    finally:
        other.stop()


def test_all_follow_a_name_that_leads_to_the_new_primary(servers: TestServers, tmp_path: Path) -> None:
    """The old primary goes on as a replica, and closes no connection."""
    binary = server_binary(servers.redis_kind)
    old, new = (EmbeddedServer(tmp_path / name, aof=True, binary=binary) for name in ("old", "new"))
    try:
        with (
            redis.Redis(port=old.port) as first,
            redis.Redis(port=new.port) as second,
            Proxy(old.port) as proxy,
            reached_by(proxy.url),
        ):
            for client in (first, second):
                client.config_set("appendfsync", "always")
            use()
            assert flow().batches == 1
            second.replicaof("127.0.0.1", old.port)
            until(lambda: second.info("replication")["master_link_status"] == "up", "the replica follows")
            second.replicaof("NO", "ONE")
            first.replicaof("127.0.0.1", new.port)
            proxy.in_turn(new.port)
            assert use().allowed, "decided by the new primary, in the same call"
            with pytest.raises(ResponseError, match=r"READONLY|read only"):
                flow()
            assert flow().batches == 1
            assert publish_version(7) == 7
            assert {fact.name: fact for fact in facts()}["redis"].level is Level.GREEN
            assert sum(Line.objects.values_list("admitted_requests", flat=True)) == 2
    finally:
        old.stop()
        new.stop()
