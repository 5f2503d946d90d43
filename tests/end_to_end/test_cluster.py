"""Test deciding, counting and draining on a cluster of three nodes, as if it were one server."""

from __future__ import annotations

import asyncio
import re
import signal
import ssl
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import redis
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.db.models import Sum
from django.test import override_settings
from redis.cluster import LoadBalancingStrategy
from redis.exceptions import AskError, ResponseError
from rest_framework.response import Response
from rest_framework.test import APIRequestFactory
from rest_framework.views import APIView

from ratelimits import engine
from ratelimits.algorithms.limits import Concurrency
from ratelimits.checks.settings import check_cache
from ratelimits.doctor.diagnosis import diagnose
from ratelimits.doctor.findings import Part
from ratelimits.embedded import free_port
from ratelimits.engine import (
    AlreadySettled,
    Decision,
    Limit,
    Meter,
    Mode,
    NotSent,
    Stale,
    Unanswered,
    Unavailable,
    memory,
)
from ratelimits.engine import server as server_module
from ratelimits.engine.call import Call, shard
from ratelimits.engine.cluster.split import slot_of
from ratelimits.engine.decide import decide_call
from ratelimits.engine.memory import Shortage
from ratelimits.engine.memory_watch import look
from ratelimits.engine.program import Term, program
from ratelimits.engine.server import current_server, publish_version
from ratelimits.engine.transport.ages import IDLE, LIFETIME, LIFETIME_OF_CREDENTIALS
from ratelimits.engine.transport.breaker import FAILURES, prober
from ratelimits.engine.transport.multiplexed import Multiplexed
from ratelimits.identity import Identity
from ratelimits.models import Rule
from ratelimits.outbound import WaitTooLong, permits
from ratelimits.quota import checking, spending
from ratelimits.quota.deny_cache import DenyCache, send
from ratelimits.simulate.trial import try_rule
from ratelimits.throttling import UserRateThrottle
from ratelimits.usage.erasure.everywhere import erase_everywhere
from ratelimits.usage.ledger import process_totals
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.models import Batch, DurabilityGap, Line, QuarantinedBatch
from ratelimits.usage.models.gaps import GapKind, of_shard
from tests.doctor.restrictions import connected
from tests.support.cluster import NODES, Cluster, wait_until_loaded
from tests.support.customers import present
from tests.support.end_to_end.cluster_asker import CAPACITY
from tests.support.engine.asking import KEYS, NOW, SECOND, home, limit, usage
from tests.support.engine.memory import FULL, SHORT, looking_by_hand, shortage, use_share
from tests.support.engine.proxy import Proxy
from tests.support.engine.rotating import Callers, Provider, Streaming, Users
from tests.support.engine.saying import let_be_idle, let_be_old
from tests.support.engine.tls import Certificate
from tests.support.entry_points import begin_afresh
from tests.support.eventually import until
from tests.support.raw import RawRedis
from tests.support.restricted import as_user, user_of
from tests.support.rows import rule, unsaved
from tests.support.servers import TestServers, server_binary
from tests.support.siblings import siblings
from tests.support.usage.traffic import at, flow

ROOT = Path(__file__).resolve().parents[2]
ACCOUNT = "acme"
TEN: dict[str, Any] = {"capacity": 10, "period": 1_000_000}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "token_bucket": {},
    "gcra": {},
    "leaky_bucket": {},
    "fixed_window": {"window_start": "first_hit"},
    "calendar_window": {"calendar_unit": "month", "period": None},
    "sliding_window": {"sub_windows": 4},
    "sliding_log": {},
    "leaky_bucket_queue": {"delay_after": 10},
    "concurrency": {"lease_ttl": 1_000_000},
}


@pytest.fixture(scope="module")
def nodes(servers: TestServers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = Cluster(tmp_path_factory.mktemp("cluster"), server_binary(servers.redis_kind))
    yield running
    running.stop()


@pytest.fixture
def cluster(nodes: Cluster) -> Iterator[Cluster]:
    """Run the engine on three empty nodes during the test."""
    nodes.empty()
    with nodes.settings():
        yield nodes


def test_a_typed_rule_is_tried_on_the_node_of_its_keys(cluster: Cluster) -> None:
    rule = engine.algorithm_from_json({"algorithm": "token_bucket", "capacity": 10, "rate": 5, "period": 1})
    bursts, _overload = try_rule(current_server().wire, rule, None, NOW)
    assert (bursts.requested, bursts.admitted) == (120, 35)
    assert [client.dbsize() for client in cluster.clients] == [0] * NODES


@contextmanager
def frozen(cluster: Cluster, node: int) -> Iterator[None]:
    """Let a node answer nothing in the block, with a short TIMEOUT so that no request waits long for it."""
    process = cluster.servers[node].process
    with override_settings(RATELIMITS={**settings.RATELIMITS, "TIMEOUT": 0.5}):
        # Connect to every node first, so that connecting does not wait for a reply later.
        engine.peek(spread(cluster), account=ACCOUNT)
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)


def test_users_of_nodes_that_refuse_info_and_scripts_are_limited(cluster: Cluster) -> None:
    url = as_user(cluster.url)
    with user_of(cluster.clients, "-info", "-script", "-cluster", "+cluster|slots"), cluster.settings(url):
        limits = [limit("token_bucket", key, capacity=5, period=3600) for key in (*elsewhere(cluster), "user:1")]
        for client in cluster.clients:
            client.script_flush()
        assert [engine.decide(limits, account=ACCOUNT).allowed for _ in range(4)] == [True] * 4
        for client in cluster.clients:
            client.script_flush()
        again = [asyncio.run(engine.adecide(limits, account=ACCOUNT)).allowed for _ in range(4)]
        assert again == [True, False, False, False]
        server = current_server()
        server.wire.wire_of(server.keyspace, home(ACCOUNT)).probe()
        server.wire.client.close()


def elsewhere(cluster: Cluster) -> list[str]:
    """Return two keys on two nodes, neither of them the account's node."""
    found = {cluster.node_of(home(ACCOUNT)): ""}
    for number in count():
        key = f"ip:{number}"
        found.setdefault(cluster.node_of(shard(KEYS, key, "")), key)
        if len(found) == NODES:
            return [key for key in found.values() if key]
    raise AssertionError


def spread(cluster: Cluster, algorithm: str = "fixed_window", /, **more: Any) -> list[Limit]:
    """Return limits of two other nodes and of the account's node, in that order."""
    return [limit(algorithm, key, **TEN | more) for key in (*elsewhere(cluster), "user:1")]


def counted(cluster: Cluster) -> dict[str, int]:
    """Return the counters of all open batches."""
    found: dict[str, int] = {}
    for number in range(KEYS.shards):
        client: RawRedis = cluster.client_of(number)
        fields = client.hgetall(KEYS.open(number))
        found |= {name.decode(): int(value) for name, value in fields.items() if not name.startswith(b"#")}
    return found


def kinds(cluster: Cluster) -> dict[str, int]:
    """Return the counted requests by kind."""
    out: dict[str, int] = {}
    for name, value in counted(cluster).items():
        if not name.endswith("|u"):
            out[name[0]] = out.get(name[0], 0) + value
    return out


def told(decision: Decision) -> dict[str, Any]:
    """Return all fields of a decision."""
    names = ("allowed", "limit", "remaining", "retry_after", "reset_after", "wait", "binding", "standings")
    return {name: getattr(decision, name) for name in names}


def ask(limits: list[Limit], **more: Any) -> Decision:
    return engine.decide(limits, account=ACCOUNT, **{"now": NOW, **more})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_decision_over_three_nodes_says_what_one_server_would(
    nodes: Cluster, algorithm: str, redis_client: RawRedis
) -> None:
    """Try requests admitted, and refused by the first, the middle and the last shard; peek, refund, settle, reset."""
    more = ALGORITHMS[algorithm]
    limits = spread(nodes, algorithm, **more)

    def story() -> list[dict[str, Any]]:
        said = []

        def one(*costs: int, now: int) -> Decision:
            these = [
                limit(algorithm, each.key, cost=cost, **TEN | more) for each, cost in zip(limits, costs, strict=True)
            ]
            decision = ask(these, now=now, timeout=0)
            said.append(told(decision))
            return decision

        one(1, 2, 3, now=NOW)
        receipt = one(3, 2, 1, now=NOW + SECOND).receipt
        assert receipt is not None
        one(8, 1, 1, now=NOW + 2 * SECOND)
        one(1, 8, 1, now=NOW + 3 * SECOND)
        one(1, 1, 8, now=NOW + 4 * SECOND)
        one(8, 9, 50, now=NOW + 5 * SECOND)
        one(0, 0, 0, now=NOW + 6 * SECOND)
        said.append(told(engine.peek(limits, account=ACCOUNT, now=NOW + 6 * SECOND)))
        return said

    with nodes.settings():
        nodes.empty()
        there = story()
    assert there == story()
    assert [one["allowed"] for one in there] == [True, True, False, False, False, False, True, True]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_a_receipt_took_is_given_back_on_every_node_once(cluster: Cluster, algorithm: str) -> None:
    limits = spread(cluster, algorithm, **ALGORITHMS[algorithm])
    before = engine.peek(limits, account=ACCOUNT).standings
    decisions = [engine.decide(limits, account=ACCOUNT, usage=usage()) for _ in range(3)]
    left = [standing.remaining for standing in decisions[-1].standings]
    for decision in decisions:
        assert decision.receipt is not None
        engine.refund(decision.receipt)
        with pytest.raises(AlreadySettled):
            engine.refund(decision.receipt)
    after = engine.peek(limits, account=ACCOUNT).standings
    assert [one.remaining for one in after] == [one.remaining for one in before] != left
    assert kinds(cluster) == {"a": 3, "r": 3}


def test_limits_in_one_shard_are_one_call_to_its_node(cluster: Cluster) -> None:
    mine = [limit(key=key, **TEN) for key in ("user:1", "api_key:2", f"account:{ACCOUNT}")]
    engine.decide(mine, account=ACCOUNT, usage=usage())
    before = cluster.calls()
    engine.decide(mine, account=ACCOUNT, usage=usage())
    own_node = cluster.node_of(home(ACCOUNT))
    assert [after - was for after, was in zip(cluster.calls(), before, strict=True)] == [
        int(number == own_node) for number in range(NODES)
    ]


def test_a_request_is_counted_once_and_in_the_accounts_shard(cluster: Cluster) -> None:
    for _ in range(3):
        assert engine.decide(spread(cluster), account=ACCOUNT, usage=usage()).allowed
    fields: Any = cluster.client_of(home(ACCOUNT)).hgetall(KEYS.open(home(ACCOUNT)))
    assert sum(int(value) for name, value in fields.items() if name.startswith(b"a|")) == 3
    assert kinds(cluster) == {"a": 3}


def test_a_request_is_counted_in_the_accounts_shard_where_none_of_its_limits_lies(cluster: Cluster) -> None:
    limits = spread(cluster)[:2]
    for _ in range(3):
        receipt = engine.decide(limits, account=ACCOUNT, usage=usage()).receipt
    assert receipt is not None
    engine.settle(receipt, (3, 3, 3))
    fields: Any = cluster.client_of(home(ACCOUNT)).hgetall(KEYS.open(home(ACCOUNT)))
    assert sorted((name[:1], name[-1:], value) for name, value in fields.items() if name[:1] in b"ar") == [
        (b"a", b"1", b"3"),
        (b"a", b"u", b"2"),
    ]
    assert [one.remaining for one in engine.peek(limits, account=ACCOUNT).standings] == [5, 5]


@pytest.mark.parametrize("refusing", range(NODES))
def test_a_refusal_by_any_shard_takes_nothing_and_is_counted_once_by_the_rule_that_refused(
    cluster: Cluster, refusing: int
) -> None:
    capacities = [5 if number == refusing else 10 for number in range(NODES)]
    limits = [
        limit("fixed_window", each.key, rule=number + 1, version=1, cost=9, **TEN | {"capacity": capacity})
        for number, (each, capacity) in enumerate(zip(spread(cluster), capacities, strict=True))
    ]
    decisions = [
        engine.decide(limits, account=ACCOUNT, usage=usage()),
        asyncio.run(engine.adecide(limits, account=ACCOUNT, usage=usage())),
    ]
    for decision in decisions:
        assert (decision.allowed, decision.binding, decision.retry_after) == (False, refusing, None)
        assert decision.receipt is None
    assert [one.remaining for one in engine.peek(limits, account=ACCOUNT).standings] == capacities
    assert {(name[0], name.split("|")[3]) for name in counted(cluster)} == {("d", str(refusing + 1))}
    assert kinds(cluster) == {"d": 2}


def test_a_shadow_rule_that_would_have_refused_gives_nothing_back_after_a_refusal(cluster: Cluster) -> None:
    shadow = limit("fixed_window", elsewhere(cluster)[0], cost=2, mode=Mode.SHADOW, **TEN | {"capacity": 3})
    full = limit("fixed_window", "user:1", cost=11, **TEN)
    assert engine.decide([shadow], account=ACCOUNT).standings[0].remaining == 1
    refused = engine.decide([shadow, full], account=ACCOUNT)
    assert (refused.allowed, refused.standings[0].allowed, refused.standings[0].remaining) == (False, False, 1)
    assert engine.peek([shadow], account=ACCOUNT).standings[0].remaining == 1


def test_a_lease_that_was_held_before_is_still_held_after_a_refusal_under_its_name(cluster: Cluster) -> None:
    leases = limit("concurrency", elsewhere(cluster)[0], cost=2, **TEN | {"lease_ttl": 1000})
    full = limit("fixed_window", "user:1", cost=11, **TEN)
    assert engine.decide([leases], account=ACCOUNT, lease="job").allowed
    assert not engine.decide([leases, full], account=ACCOUNT, lease="job").allowed
    assert engine.peek([leases], account=ACCOUNT).remaining == 8


@pytest.mark.parametrize("algorithm", ["smooth_bursty", "smooth_warming_up"])
def test_stored_permits_that_nobody_can_give_back_are_not_taken_where_the_last_shard_refuses(
    cluster: Cluster, algorithm: str
) -> None:
    ip = limit(algorithm, elsewhere(cluster)[0], capacity=None, **({"warm_up": 10} if "warm" in algorithm else {}))
    user = limit("fixed_window", "user:1", cost=11, rule=7, **TEN)
    engine.decide([ip], account=ACCOUNT, now=NOW)
    before = engine.peek([ip], account=ACCOUNT, now=NOW + 60 * SECOND).standings
    decision = engine.decide([ip, user], account=ACCOUNT, usage=usage(), now=NOW + 60 * SECOND)
    assert (decision.allowed, decision.binding) == (False, 1)
    assert engine.peek([ip], account=ACCOUNT, now=NOW + 60 * SECOND).standings == before
    assert kinds(cluster) == {"d": 1}


def test_a_window_that_the_first_hit_opens_is_not_opened_by_a_request_that_the_last_shard_refuses(
    cluster: Cluster,
) -> None:
    ip = limit("fixed_window", elsewhere(cluster)[0], capacity=2, period=60, window_start="first_hit")
    user = limit("fixed_window", "user:1", cost=11, **TEN)
    assert not engine.decide([ip, user], account=ACCOUNT, usage=usage(), now=NOW).allowed
    later = [engine.decide([ip], now=NOW + seconds * SECOND).allowed for seconds in (50, 51, 61)]
    assert later == [True, True, False]
    assert kinds(cluster) == {"d": 1}


def test_the_async_functions_do_the_same(cluster: Cluster) -> None:
    limits = [*spread(cluster), *spread(cluster, "concurrency", name="leases", lease_ttl=1000)]

    async def work() -> list[int]:
        decision = await engine.adecide(limits, account=ACCOUNT, usage=usage())
        left = [one.remaining for one in decision.standings]
        assert decision.receipt is not None
        left += [one.remaining for one in (await engine.arelease(decision.receipt)).standings]
        left += [one.remaining for one in (await engine.arefund(decision.receipt)).standings]
        await engine.adecide(limits, account=ACCOUNT)
        await engine.areset(limits, account=ACCOUNT)
        return left + [one.remaining for one in (await engine.apeek(limits, account=ACCOUNT)).standings]

    assert asyncio.run(work()) == [*[9] * 6, *[9] * 3, *[10] * 9, *[10] * 6]


@pytest.mark.parametrize("step", range(1, NODES + 1))
def test_a_task_that_is_cancelled_before_it_asks_a_shard_leaves_nothing_taken(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    limits = [*spread(cluster), *spread(cluster, "concurrency", name="leases", lease_ttl=1000)]
    queue, asked = Multiplexed._queue, 0

    def cancelled(self: Multiplexed, *command: Any) -> Any:
        nonlocal asked
        asked += 1
        if asked == step:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
        return queue(self, *command)

    async def work() -> list[int]:
        nonlocal asked
        # All nodes know all scripts, so each shard is asked once.
        decision = await engine.adecide(limits, account=ACCOUNT)
        assert decision.receipt is not None
        await engine.arefund(decision.receipt)
        asked = 0
        monkeypatch.setattr(Multiplexed, "_queue", cancelled)
        with pytest.raises(asyncio.CancelledError):
            await asyncio.ensure_future(engine.adecide(limits, account=ACCOUNT))
        return [one.remaining for one in (await engine.apeek(limits, account=ACCOUNT)).standings]

    assert asyncio.run(work()) == [10] * 6
    assert asked >= step


def test_what_a_shadow_rule_elsewhere_would_have_refused_is_counted_beside_the_admission(cluster: Cluster) -> None:
    none = limit("fixed_window", **TEN | {"capacity": 1}).algorithm
    keys = (*elsewhere(cluster), "user:1")
    terms = tuple(Term(none, "rule", number, 0, Mode.SHADOW, rule=number + 1, version=1) for number in range(len(keys)))
    call = Call(program(terms), keys, (2,), ACCOUNT, usage(Meter("requests")), version=1)
    assert decide_call(current_server(), call).allowed
    fields = {(name[0], name.split("|")[3], name[-1]): value for name, value in counted(cluster).items()}
    assert fields == {("a", "0", "n"): 1, ("a", "0", "u"): 2} | {
        ("s", str(rule), suffix): value for rule in (1, 2, 3) for suffix, value in (("n", 1), ("u", 2))
    }


def test_an_edit_makes_every_shard_stale_and_nothing_was_taken(cluster: Cluster) -> None:
    limits = [limit("fixed_window", each.key, version=3, **TEN) for each in spread(cluster)]
    engine.decide(limits, account=ACCOUNT)
    assert publish_version(4) == 4
    cluster.client_of(shard(KEYS, limits[0].key, "")).set(KEYS.head(shard(KEYS, limits[0].key, "")), "3 ?")
    with pytest.raises(Stale) as stale:
        engine.decide(limits, account=ACCOUNT, usage=usage())
    assert stale.value.version == 4
    newer = [limit("fixed_window", each.key, version=4, **TEN) for each in limits]
    assert [one.remaining for one in engine.peek(newer, account=ACCOUNT).standings] == [9, 9, 9]
    assert kinds(cluster) == {}


@pytest.mark.parametrize("lost", range(NODES))
def test_where_a_reply_is_lost_the_other_shards_have_their_permits_back(cluster: Cluster, lost: int) -> None:
    limits = spread(cluster)
    assert engine.decide(limits, account=ACCOUNT, usage=usage()).allowed
    node = cluster.node_of(shard(KEYS, limits[lost].key, ACCOUNT, ("user:",)))
    with frozen(cluster, node), pytest.raises(Unanswered):
        engine.decide(limits, account=ACCOUNT, usage=usage())
    left = [one.remaining for one in engine.peek(limits, account=ACCOUNT).standings]
    assert [each for number, each in enumerate(left) if number != lost] == [9, 9]
    assert left[lost] in (8, 9)
    # Acknowledged ≤ counted ≤ acknowledged + unanswered.
    assert kinds(cluster)["a"] in ((1, 2) if lost == NODES - 1 else (1,))


def test_a_node_that_is_away_takes_its_own_shards_with_it_and_no_others(cluster: Cluster) -> None:
    limits = spread(cluster)
    away = cluster.node_of(shard(KEYS, limits[1].key, ""))
    engine.decide(limits, account=ACCOUNT, usage=usage())
    cluster.servers[away].kill()
    try:
        with pytest.raises(engine.Unavailable):
            engine.decide(limits, account=ACCOUNT, usage=usage())
        with pytest.raises(NotSent):
            engine.decide(limits, account=ACCOUNT, usage=usage())
        others = [limits[0], limits[2]]
        assert [one.remaining for one in engine.peek(others, account=ACCOUNT).standings] == [9, 9]
        assert engine.decide(others, account=ACCOUNT, usage=usage()).allowed
    finally:
        cluster.servers[away].start()
    wait_until_loaded(cluster.clients[away])
    left = [one.remaining for one in engine.decide(limits, account=ACCOUNT, usage=usage()).standings]
    assert left == [7, 8, 7]
    assert kinds(cluster) == {"a": 3}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_while_a_node_is_away_the_failure_policy_answers_for_its_shards_and_the_others_are_decided(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    begin_afresh(monkeypatch)
    rule(key_kind="account", capacity=1000)
    accounts: dict[int, str] = {}
    for account in map("account-{}".format, range(12)):
        accounts.setdefault(cluster.node_of(home(account)), account)

    def decided(node: int) -> bool:
        who = Identity(account=f"account:{accounts[node]}")
        answer = asyncio.run(checking.acheck(who)) if asynchronous else checking.check(who)
        assert answer.allowed
        return answer.decision is not None

    assert [decided(node) for node in range(NODES)] == [True, True, True]
    with frozen(cluster, 1):
        for _ in range(FAILURES + 2):
            assert [decided(node) for node in (1, 0, 2)] == [False, True, True]
        # No request waits for it any longer.
        with pytest.raises(NotSent, match="did not answer just now"):
            engine.decide([limit()], account=accounts[1])
    until(lambda: decided(1), "it is asked again after a pause")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rule_too_many_is_left_out_and_the_others_hold_on_their_nodes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    begin_afresh(monkeypatch)
    kinds_of_keys = "user", "account", "ip", "global"
    Rule.objects.bulk_create(unsaved(f"a{n:03}", key_kind=kinds_of_keys[n % 4], capacity=1000) for n in range(119))
    rule("b", "fixed_window", capacity=2, period=10**8, key_kind="ip", on_failure="allow")
    unsaved("z", "fixed_window", capacity=3, period=10**8, key_kind="user", on_failure="local").save()

    def decided(user: int, address: int) -> bool:
        who = Identity(f"user:{user}", account="account:acme", address=f"ip:203.0.113.{address}")
        return (asyncio.run(checking.acheck(who)) if asynchronous else checking.check(who)).allowed

    assert [decided(1, 1) for _ in range(3)] == [True, True, False]
    assert [decided(1, 2), decided(1, 2), decided(2, 2), decided(2, 2)] == [True, False, True, False]
    assert kinds(cluster) == {"a": 4, "d": 2}


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_monthly_limit_outlives_the_data_of_all_nodes(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    begin_afresh(monkeypatch)
    rule("monthly", "calendar_window", capacity=5, key_kind="user")
    rule("wide", "fixed_window", capacity=1000, period=10**8, key_kind="ip")
    who = Identity(user="user:1", account=f"account:{ACCOUNT}", address=elsewhere(cluster)[0])

    def allowed() -> bool:
        return (asyncio.run(checking.acheck(who)) if asynchronous else checking.check(who)).allowed

    assert [allowed() for _ in range(3)] == [True] * 3
    flow()
    for client in cluster.clients:
        client.flushall()
    assert [allowed() for _ in range(4)] == [True, True, False, False]
    wide = limit("fixed_window", name="wide", key=who.address or "", capacity=1000, period=10**8)
    assert engine.peek([wide]).remaining == 998


def test_a_slot_on_the_move_is_refused_and_a_moved_one_is_followed(cluster: Cluster) -> None:
    key = elsewhere(cluster)[0]
    number = shard(KEYS, key, "")
    source = cluster.node_of(number)
    target, slot = (source + 1) % NODES, slot_of(KEYS, number)
    ids = [client.execute_command("CLUSTER MYID").decode() for client in cluster.clients]
    limits = [limit("fixed_window", key, **TEN), limit("fixed_window", "user:1", **TEN)]
    engine.decide(limits, account=ACCOUNT)

    def begin(source: int, target: int) -> None:
        cluster.clients[target].cluster("SETSLOT", slot, "IMPORTING", ids[source])
        cluster.clients[source].cluster("SETSLOT", slot, "MIGRATING", ids[target])
        for name in cluster.clients[source].cluster("GETKEYSINSLOT", slot, 100):
            cluster.clients[source].migrate("127.0.0.1", cluster.servers[target].port, name, 0, 5000)

    def end(target: int) -> None:
        for client in (cluster.clients[target], *cluster.clients):
            client.cluster("SETSLOT", slot, "NODE", ids[target])

    begin(source, target)
    try:
        with pytest.raises(NotSent, match=r"the slot is being moved from 127\.0\.0\.1:\d+ to another node"):
            engine.decide(limits, account=ACCOUNT)
    finally:
        end(target)
    try:
        moved = engine.decide(limits, account=ACCOUNT)
        assert [one.remaining for one in moved.standings] == [8, 8]
        assert asyncio.run(engine.adecide(limits, account=ACCOUNT)).remaining == 7
    finally:
        begin(target, source)
        end(source)
    assert engine.decide(limits, account=ACCOUNT).remaining == 6


def test_a_slot_that_nobody_had_for_a_while_is_decided_again_once_somebody_has_it(cluster: Cluster) -> None:
    slot, owner = slot_of(KEYS, home(ACCOUNT)), cluster.client_of(home(ACCOUNT))
    rows = len(owner.execute_command("CLUSTER SLOTS"))
    for client in (owner, *(one for one in cluster.clients if one is not owner)):
        client.cluster("DELSLOTS", slot)
    try:
        until(lambda: all(len(one.execute_command("CLUSTER SLOTS")) > rows for one in cluster.clients), "nobody has it")
        for _ in range(2):
            with pytest.raises(NotSent, match=f"no node of the cluster has slot {slot}"):
                engine.decide([limit(key="user:1", **TEN)], account=ACCOUNT)
        ip = elsewhere(cluster)[0]
        assert engine.decide([limit(key=ip)]).allowed
        # It does not keep an edit from the other shards either.
        with pytest.raises(NotSent, match=f"no node of the cluster has slot {slot}"):
            publish_version(2)
        with pytest.raises(Stale):
            engine.decide([limit(key=ip, version=1)])
    finally:
        owner.cluster("ADDSLOTS", slot)
    assert engine.decide([limit(key="user:1", **TEN)], account=ACCOUNT).allowed
    assert asyncio.run(engine.adecide([limit(key="user:1", **TEN)], account=ACCOUNT)).remaining == 8


def lose_a_reply(node: redis.Redis, ask: Callable[[], object]) -> None:
    """Ask a node, and end its connections before it replies."""
    node.execute_command("CLIENT", "PAUSE", 60_000, "WRITE")
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(ask)
            while not asked.done():
                node.client_kill_filter(_type="normal", skipme=True)
            with pytest.raises(Unavailable):
                asked.result()
    finally:
        node.execute_command("CLIENT", "UNPAUSE")


def test_a_node_that_has_left_the_cluster_is_not_believed(
    cluster: Cluster, servers: TestServers, tmp_path: Path
) -> None:
    """The node still answers, but knows no slots."""
    first = next(key for key in map("ip:{}".format, count()) if cluster.node_of(shard(KEYS, key, "")) == 0)
    with cluster.guest(home(ACCOUNT), tmp_path, server_binary(servers.redis_kind)) as guest:
        assert engine.decide([limit(key="user:1")], account=ACCOUNT).allowed
        assert guest.exists(KEYS.head(home(ACCOUNT)))
        assert engine.decide([limit(key=first)]).allowed
        guest.flushall()
    for _ in range(2):
        # A lost reply: the slots are asked for again, from other nodes first.
        lose_a_reply(cluster.clients[0], lambda: engine.decide([limit(key=first)]))
        for key in [first, *elsewhere(cluster)]:
            assert engine.decide([limit(key=key)]).allowed
        assert engine.decide([limit(key="user:1")], account=ACCOUNT).allowed


@pytest.mark.parametrize("what", ["*:x", "*c:*:"])
def test_leases_of_which_a_half_has_moved_are_left_alone(cluster: Cluster, what: str) -> None:
    leases = limit("concurrency", "user:1", **TEN | {"lease_ttl": 1000})
    receipt = engine.decide([leases], account=ACCOUNT).receipt
    assert receipt is not None
    (half,) = cluster.client_of(home(ACCOUNT)).keys(what)
    with cluster.on_the_move(home(ACCOUNT)) as take:
        take(half)
        with pytest.raises(NotSent):
            engine.decide([leases], account=ACCOUNT)
        with pytest.raises(NotSent):
            engine.release(receipt)
    assert engine.decide([leases], account=ACCOUNT).remaining == 8
    assert engine.release(receipt).remaining == 9


@pytest.mark.parametrize(
    ("algorithm", "more"), [("fixed_window", {}), ("sliding_log", {}), ("concurrency", {"lease_ttl": 1000})]
)
def test_what_was_charged_in_a_slot_on_the_move_is_answered_though_its_full_batch_cannot_be_sealed(
    cluster: Cluster, algorithm: str, more: dict[str, Any]
) -> None:
    mine, number = limit(algorithm, "user:1", **TEN | more), home(ACCOUNT)
    node = cluster.client_of(number)

    def request(key: str) -> int:
        decision = engine.decide([mine], account=ACCOUNT, usage=usage(key=key))
        assert decision.allowed
        return decision.remaining

    assert request("user:1") == 9
    node.hset(KEYS.open(number), mapping={f"a|1|requests|0|0|acme|user:x{each}|1": 1 for each in range(5000)})
    with cluster.on_the_move(number):
        assert request("user:2") == 8
        assert node.exists(KEYS.open(number))
    assert request("user:3") == 7
    assert node.llen(KEYS.sealed(number)) == 1
    name: Any = node.lindex(KEYS.sealed(number), 0)
    batch: Any = node.hgetall(KEYS.batch(number, name.decode()))
    assert sum(int(value) for name, value in batch.items() if name.startswith(b"a|")) == 5003


@pytest.mark.django_db(transaction=True)
def test_a_replica_that_takes_over_is_followed_and_counts_under_an_incarnation_of_its_own(
    cluster: Cluster, servers: TestServers, tmp_path: Path
) -> None:
    fail_over_by_hand(cluster, tmp_path, server_binary(servers.redis_kind))


@pytest.mark.system
@pytest.mark.django_db(transaction=True)
def test_over_tls_a_replica_that_takes_over_is_followed_too(tmp_path: Path) -> None:
    binary = server_binary("redis7")
    running = Cluster(tmp_path, binary, certificate=Certificate(tmp_path))
    try:
        with running.settings():
            fail_over_by_hand(running, tmp_path, binary)
            wire: Any = current_server().wire
            opened = [owned.connection for node in wire._nodes.values() for owned in node._idle._idle]
            assert {type(connection._sock) for connection in opened} == {ssl.SSLSocket}
            wire.client.close()
    finally:
        running.stop()


def fail_over_by_hand(cluster: Cluster, folder: Path, binary: Path) -> None:
    """Let a replica of a node take over, which loses nothing, and test that the app follows."""
    number = cluster.node_of(home(ACCOUNT))
    limits = spread(cluster)
    for _ in range(3):
        assert engine.decide(limits, account=ACCOUNT, usage=usage()).allowed
    flow()
    with cluster.replica(number, folder, binary) as new:
        acknowledged, unanswered = 3, 0
        cluster.fail_over(new)
        while acknowledged < 6:
            try:
                acknowledged += engine.decide(limits, account=ACCOUNT, usage=usage()).allowed
            except Unanswered:
                # The old primary closed its connections, including this one.
                unanswered += 1
        assert unanswered <= 1
        assert asyncio.run(engine.apeek(limits, account=ACCOUNT)).remaining in (4, 4 - unanswered)
        assert new.exists(KEYS.open(home(ACCOUNT)))
        flow()
    served = Line.objects.aggregate(requests=Sum("admitted_requests"))["requests"]
    assert acknowledged <= served <= acknowledged + unanswered
    assert DurabilityGap.objects.filter(of_shard(home(ACCOUNT)), kind=GapKind.RESTART).exists()


@pytest.mark.django_db(transaction=True)
def test_what_several_processes_were_served_is_charged_on_every_node_and_in_the_ledger(cluster: Cluster) -> None:
    keys = [*elsewhere(cluster), "user:1"]
    with siblings("tests.support.end_to_end.cluster_asker", 3, cluster.url) as processes:
        for process in processes:
            process.ask({"times": 100, "keys": keys})
        admitted = sum(process.answer() for process in processes)
    limits = [limit("fixed_window", key, capacity=CAPACITY, period=1_000_000) for key in keys]
    charged = [CAPACITY - one.remaining for one in engine.peek(limits, account=ACCOUNT).standings]
    assert charged == [admitted] * NODES
    # A request may have been refused because another one had a permit for a moment; then the permit was not used.
    assert CAPACITY / 2 < admitted <= CAPACITY
    assert sum(kinds(cluster).values()) == 300
    flow()
    lines = Line.objects.aggregate(Sum("admitted_units"), Sum("admitted_requests"), Sum("denied_requests"))
    assert lines["admitted_units__sum"] == admitted
    assert lines["admitted_requests__sum"] + lines["denied_requests__sum"] == 300


@pytest.mark.django_db(transaction=True)
def test_an_erased_customer_is_named_on_no_node(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_afresh(monkeypatch)
    for kind in ("account", "user"):
        rule(f"month-{kind}", "calendar_window", capacity=50, key_kind=kind)
        rule(f"log-{kind}", "sliding_log", capacity=50, key_kind=kind)

    def naming() -> set[int]:
        """Return which nodes have a key that names the customer."""
        return {number for number, client in enumerate(cluster.clients) if list(client.scan_iter("*leaver*"))}

    users = [f"user:leaver-{number}" for number in range(8)]
    assert all(checking.check(Identity(user=user, account="account:leaver")).allowed for user in users)
    flow()
    assert naming() == set(range(NODES))
    # A packed state, and a log with its tree, of nine keys.
    assert erase_everywhere(present("default", ["leaver"])["leaver"]).keys == 9 * 3
    assert naming() == set()


@pytest.mark.django_db(transaction=True)
def test_usage_of_accounts_on_every_node_is_sealed_and_drained_once(cluster: Cluster) -> None:
    accounts = [f"account-{number}" for number in range(12)]
    assert {cluster.node_of(home(account)) for account in accounts} == set(range(NODES))

    def serve() -> None:
        for account in accounts:
            mine = [limit(key="user:1", **TEN | {"capacity": 100}), limit(key=elsewhere(cluster)[0], capacity=1000)]
            engine.decide(mine, account=account, usage=usage(account=account))

    for _ in range(2):
        serve()
        flow()
    flow()
    per_account = Line.objects.values_list("account").annotate(Sum("admitted_requests")).order_by()
    assert dict(per_account) == dict.fromkeys(accounts, 2)
    assert Batch.objects.count() == 2 * len({home(account) for account in accounts})
    assert not DurabilityGap.objects.exists()
    assert not any(cluster.client_of(number).exists(KEYS.sealed(number)) for number in range(KEYS.shards))


@contextmanager
def without_memory(cluster: Cluster) -> Iterator[None]:
    """Let no node have free memory in the block, whatever is deleted."""
    for client in cluster.clients:
        client.config_set("maxmemory", 1)
    try:
        yield
    finally:
        for client in cluster.clients:
            client.config_set("maxmemory", 0)


@pytest.mark.django_db(transaction=True)
def test_nodes_without_free_memory_are_sealed_and_drained(cluster: Cluster) -> None:
    accounts = [f"account-{number}" for number in range(12)]
    for account in accounts:
        engine.decide([limit(key="user:1", capacity=100)], account=account, usage=usage(account=account))
    with without_memory(cluster):
        flow()
    per_account = Line.objects.values_list("account").annotate(Sum("admitted_requests")).order_by()
    assert dict(per_account) == dict.fromkeys(accounts, 1)
    assert not DurabilityGap.objects.exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("is_async", [False, True])
def test_full_nodes_decide_and_new_addresses_share_a_count(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, is_async: bool
) -> None:
    begin_afresh(monkeypatch)
    rule("hourly", "fixed_window", capacity=2, period=3600, key_kind="ip", on_failure="allow")
    rule("users", "fixed_window", capacity=100, period=3600, key_kind="user", on_failure="allow")

    def admitted(*addresses: str) -> list[bool]:
        found = []
        for address in addresses:
            who = Identity("user:1", None, f"account:{ACCOUNT}", f"ip:{address}")
            answer = asyncio.run(checking.acheck(who)) if is_async else checking.check(who)
            assert answer.decision is not None
            found.append(answer.allowed)
        return found

    assert admitted("203.0.113.1") == [True]
    with looking_by_hand(monkeypatch, *cluster.clients):
        for client in cluster.clients:
            use_share(client, FULL)
        assert admitted("203.0.113.1", "203.0.113.1") == [True, False]
        assert admitted(*[f"10.0.{number}.1" for number in range(6)]) == [True, True, False, False, False, False]
        assert {name[0]: count for name, count in counted(cluster).items()} == {"a": 4, "d": 5}
        memory.forget()
        use_share(cluster.clients[-1], SHORT)
        for client in cluster.clients[:-1]:
            client.config_set("maxmemory", 0)
        look()
        assert shortage() is Shortage.SHORT, "the fullest node counts"
    look()
    assert shortage() is Shortage.NONE


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("counts", [True, False])
def test_a_slot_that_moves_with_its_keys_loses_nothing_and_declares_nothing(cluster: Cluster, counts: bool) -> None:
    accounts = [ACCOUNT, *(f"account-{number}" for number in range(12))]  # several on every node

    def use() -> None:
        for account in accounts:  # some share a shard, and there also the limit of user:1
            engine.decide([limit(capacity=100)], account=account, usage=usage(account=account))

    use()
    flow()
    if counts:
        use()
    with cluster.moved(home(ACCOUNT)):
        if counts:
            use()
        flow()
        flow()
    use()
    flow()
    assert Line.objects.aggregate(sum=Sum("admitted_requests"))["sum"] == len(accounts) * (4 if counts else 2)
    assert not DurabilityGap.objects.exists()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("what", ["batch", "meta"])
def test_a_shard_on_the_move_waits_for_the_next_drain_and_keeps_no_other_from_the_ledger(
    cluster: Cluster, what: str
) -> None:
    # The fence would write its key in the first shard of a node. So this shard moves.
    number, *neighbours = (shard for shard in range(KEYS.shards) if cluster.node_of(shard) == 0)
    others = [f"account-{index}" for index in range(12)]
    assert not {home(account) for account in others}.isdisjoint(neighbours)
    accounts = [next(name for name in map("mover-{}".format, count()) if home(name) == number), *others]
    engine.decide([limit()], account=accounts[0], usage=usage(account=accounts[0]))
    seal()
    for account in accounts[1:]:
        engine.decide([limit()], account=account, usage=usage(account=account))
    names: Any = cluster.client_of(number).lrange(KEYS.sealed(number), 0, -1)
    (name,) = names
    moved = KEYS.batch(number, name.decode()) if what == "batch" else KEYS.meta(number)
    with cluster.on_the_move(number) as take:
        take(moved)
        with pytest.raises(ResponseError):
            seal()
        with pytest.raises(AskError):
            drain()
    drained = set(Line.objects.values_list("account", flat=True))
    assert drained == {account for account in accounts if home(account) != number}
    assert not QuarantinedBatch.objects.exists()
    flow()
    assert sorted(Line.objects.values_list("account", flat=True)) == sorted(accounts)
    assert not DurabilityGap.objects.exists()


@pytest.mark.django_db(transaction=True)
def test_a_record_that_moves_while_it_is_declared_is_declared_once_and_removed_later(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, counter = home(ACCOUNT), f"a|{NOW // SECOND}|requests|0|0|{ACCOUNT}|user:1"
    key, store = KEYS.prefetched(number), process_totals.store
    cluster.client_of(number).hset(key, "killed", f"0 3 1 {counter} 1")
    with cluster.on_the_move(number) as take:

        def store_and_move(*args: Any) -> None:
            store(*args)
            take(key)

        monkeypatch.setattr(process_totals, "store", store_and_move)
        assert process_totals.declare_unreported(current_server(), [number]) == 0
    monkeypatch.undo()
    assert process_totals.declare_unreported(current_server(), [number]) == 1
    assert DurabilityGap.objects.get().units == 3
    assert not cluster.client_of(number).exists(key)


@pytest.mark.django_db(transaction=True)
def test_an_idle_process_notices_that_a_node_is_back(cluster: Cluster) -> None:
    who = Identity("user:1", None, f"account:{ACCOUNT}", "ip:203.0.113.9")
    rule("burst", capacity=1000)
    assert checking.check(who).decision is not None
    number = cluster.node_of(home(ACCOUNT))
    cluster.servers[number].kill()
    for _ in range(FAILURES):
        assert checking.check(who).decision is None
    cluster.servers[number].start()
    assert prober.is_active()
    until(lambda: not prober.is_active(), "the process noticed")
    assert checking.check(who).decision is not None


@pytest.mark.django_db(transaction=True)
def test_a_node_that_is_away_keeps_none_of_the_others_from_the_ledger(cluster: Cluster) -> None:
    accounts = [f"account-{number}" for number in range(12)]
    for account in accounts:
        engine.decide([limit()], account=account, usage=usage(account=account))
    cluster.servers[1].kill()
    try:
        with pytest.raises(redis.RedisError):
            seal()
        with pytest.raises(redis.RedisError):
            drain()
        drained = set(Line.objects.values_list("account", flat=True))
        assert drained == {account for account in accounts if cluster.node_of(home(account)) != 1}
    finally:
        cluster.servers[1].start()
    wait_until_loaded(cluster.clients[1])
    flow()
    assert sorted(Line.objects.values_list("account", flat=True)) == sorted(accounts)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_rules_edits_and_reports_of_requests_by_several_kinds_of_keys(
    cluster: Cluster, settings: Any, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    """Test the path from rows to the ledger: an edit takes effect at the next decision, on every node."""
    settings.RATELIMITS = {**settings.RATELIMITS, "DENY_CACHE_SECONDS": 0}
    begin_afresh(monkeypatch)
    who = Identity("user:1", "api_key:9", f"account:{ACCOUNT}", "ip:203.0.113.9")
    rows = {
        kind: rule(kind, key_kind=kind, capacity=3 + number, rate="0.000001", bills=kind == "account")
        for number, kind in enumerate(("ip", "global", "account"))
    }

    def check() -> tuple[bool, str]:
        answer = asyncio.run(checking.acheck(who)) if asynchronous else checking.check(who)
        assert answer.decision is not None
        assert answer.binding is not None
        return answer.allowed, answer.binding.name

    assert [check() for _ in range(5)] == [*[(True, "ip")] * 3, *[(False, "ip")] * 2]
    rows["ip"].capacity = 100
    rows["ip"].save()
    assert [check() for _ in range(2)] == [(True, "global"), (False, "global")]
    rows["global"].delete()
    assert [check() for _ in range(2)] == [(True, "account"), (False, "account")]
    flow()
    lines = Line.objects.filter(account=ACCOUNT).values_list("rule", "admitted_requests", "denied_requests")
    served = {(number, admitted, denied) for number, admitted, denied in lines if admitted}
    assert sum(admitted for _rule, admitted, _denied in served) == 5
    assert {number for number, _admitted, _denied in served} == {rows["account"].pk}
    assert sum(denied for _rule, _admitted, denied in lines) == 4


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("lost", ["the node of the key", "all nodes"])
def test_a_key_with_accounts_on_all_nodes_goes_on_with_the_usage_of_all_of_them(
    cluster: Cluster, settings: Any, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "DENY_CACHE_SECONDS": 0, "ACCOUNT": lambda request: ACCOUNT}
    begin_afresh(monkeypatch)
    rule("monthly", "calendar_window", capacity=5, key_kind="user")
    by_node = {
        cluster.node_of(home(str(number))): Identity("user:1", account=f"account:{number}") for number in range(50)
    }
    in_accounts = [*by_node.values(), Identity("user:1", account="account:another")]
    assert [checking.check(who).allowed for who in in_accounts] == [True] * (NODES + 1)
    seal()
    drain(at("2100-01-01"))
    own_shard = shard(KEYS, "user:1", "")
    for client in cluster.clients if lost == "all nodes" else [cluster.client_of(own_shard)]:
        client.flushall()
    assert [checking.check(who).allowed for who in in_accounts] == [True, *[False] * NODES]


def test_refusals_that_a_process_answers_itself_are_counted_too(cluster: Cluster) -> None:
    limits = [limit("fixed_window", each.key, **TEN | {"capacity": 1}) for each in spread(cluster)]
    assert engine.decide(limits, account=ACCOUNT, usage=usage()).allowed
    cache = DenyCache()
    cache.keep("place", engine.decide(limits, account=ACCOUNT, usage=usage()), 60)
    for _ in range(5):
        assert cache.repeat("place") is not None
    send(current_server(), cache.take())
    assert kinds(cluster) == {"a": 1, "d": 6}


def test_throttles_with_rates_in_code_are_decided_together_on_all_nodes(cluster: Cluster) -> None:
    rates = [type("Throttle", (UserRateThrottle,), {"scope": f"s{n}", "rate": f"{n}/day"}) for n in range(2, 8)]

    def statuses(throttles: list[Any], count: int) -> list[int]:
        about = {"throttle_classes": throttles, "authentication_classes": (), "permission_classes": ()}
        view: Any = type("View", (APIView,), {**about, "get": lambda self, request: Response()})
        request = APIRequestFactory().get("/", REMOTE_ADDR="203.0.113.9")
        return [view.as_view()(request).status_code for _ in range(count)]

    assert statuses(rates, 4) == [200, 200, 429, 429]
    assert sum(client.dbsize() > 0 for client in cluster.clients) > 1
    assert statuses(rates[-1:], 6) == [200] * 5 + [429]  # two requests were charged before


def test_outbound_calls_wait_for_a_release_on_any_node(cluster: Cluster) -> None:
    for number in range(NODES * 3):  # some name for each node
        name, limit_of_one = f"api-{number}", Concurrency(1, Decimal(1000))
        with ThreadPoolExecutor(1) as pool:
            with permits(name, rate=limit_of_one):
                with pytest.raises(WaitTooLong), permits(name, rate=limit_of_one, max_wait=0):
                    pass
                waiting = pool.submit(_held, name, limit_of_one)
            assert waiting.result(30)
    assert sum(client.dbsize() > 0 for client in cluster.clients) > 1


def _held(name: str, algorithm: Concurrency) -> bool:
    with permits(name, rate=algorithm, max_wait=30):
        return True


def test_replicas_cannot_decide(nodes: Cluster) -> None:
    with (
        nodes.settings(REDIS_CLIENT_KWARGS={"load_balancing_strategy": LoadBalancingStrategy.ROUND_ROBIN}),
        pytest.raises(ImproperlyConfigured, match="replicas cannot decide"),
    ):
        current_server()


def test_a_version_of_redis_py_that_cannot_follow_a_slot_is_refused(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis, "__version__", "5.3.1")
    message = "A Redis Cluster needs version 6.0 or newer of the Python package redis, but 5.3.1 is installed."
    with nodes.settings():
        with pytest.raises(ImproperlyConfigured, match=re.escape(message)):
            current_server()
        (error,) = check_cache(None)
    assert (error.id, error.msg) == ("ratelimits.E003", message)


def test_a_cluster_of_which_no_node_answers_was_sent_nothing(nodes: Cluster) -> None:
    alias = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": f"redis://127.0.0.1:{free_port()}/0",
        "OPTIONS": {"CONNECTION_FACTORY": "ratelimits.django_redis_cluster.ConnectionFactory"},
    }
    with override_settings(CACHES={"ratelimits": alias}):
        with pytest.raises(NotSent):
            engine.decide([limit()])
        with pytest.raises(redis.RedisError):
            publish_version(1)


def test_a_cluster_that_was_away_is_asked_again_after_a_pause_and_by_no_request_in_between(
    nodes: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        Proxy(nodes.servers[0].port) as proxy,
        override_settings(
            CACHES={
                "ratelimits": {
                    "BACKEND": "django_redis.cache.RedisCache",
                    "LOCATION": proxy.url,
                    "OPTIONS": {"CONNECTION_FACTORY": "ratelimits.django_redis_cluster.ConnectionFactory"},
                }
            }
        ),
    ):
        proxy.cut.set()
        with pytest.raises(NotSent):
            engine.decide([limit()])
        asked = proxy.connections
        with pytest.raises(NotSent, match="just now"):
            engine.decide([limit()])
        assert proxy.connections == asked
        proxy.cut.clear()
        # Undo this inside the settings block, whose end clears the pause; otherwise the next test would have it.
        with monkeypatch.context() as patch:
            patch.setattr(server_module, "_not_before", 0.0)
            assert engine.peek([limit(key="ip:never")]).allowed


@pytest.mark.django_db(transaction=True)
def test_requests_with_prefetched_permits_are_counted_on_the_node_of_their_account(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_afresh(monkeypatch)
    for name, key_kind in (("own", "user"), ("all", "global")):
        rule(name, "fixed_window", key_kind=key_kind, capacity=500, period=700_000_000, prefetch=16)
    asking = Identity("user:1", None, f"account:{ACCOUNT}")
    assert sum(checking.check(asking).allowed for _ in range(100)) == 100
    spending.send_and_give_back(everything=True)
    client: RawRedis = cluster.client_of(home(ACCOUNT))
    at_home = client.hgetall(KEYS.open(home(ACCOUNT)))
    (name,) = counted(cluster)
    assert (counted(cluster)[name], at_home[name.encode()]) == (100, b"100")
    decision = checking.check(Identity("user:2", None, f"account:{ACCOUNT}")).decision
    assert decision is not None
    assert decision.remaining == 500 - 100 - 1


@contextmanager
def through_proxies(nodes: Cluster) -> Iterator[list[Proxy]]:
    """Let the app reach each of the empty nodes by a proxy."""
    nodes.empty()
    with ExitStack() as stack:
        proxies = [stack.enter_context(Proxy(server.port)) for server in nodes.servers]
        ports = dict(zip([server.port for server in nodes.servers], proxies, strict=True))

        def remap(address: tuple[str, int]) -> tuple[str, int]:
            return address[0], ports[address[1]].port if address[1] in ports else address[1]

        with nodes.settings(REDIS_CLIENT_KWARGS={"address_remap": remap}):
            yield proxies


def test_connections_that_were_dropped_while_they_were_idle_are_replaced(nodes: Cluster) -> None:
    some = spread(nodes)
    with through_proxies(nodes) as proxies, asyncio.Runner() as runner:

        def drop() -> int:
            for node in current_server().wire._nodes.values():  # type: ignore[attr-defined]
                node._pool.ages.wait = 0.05
                let_be_idle(node, 2 * IDLE)
            return sum(proxy.forget() for proxy in proxies)

        for ask in (
            lambda: engine.decide(some, account=ACCOUNT),
            lambda: runner.run(engine.adecide(some, account=ACCOUNT)),
        ):
            before = ask().remaining
            assert drop() >= NODES
            assert ask().remaining == before - 1


def test_connections_that_are_too_old_are_replaced(nodes: Cluster) -> None:
    some = spread(nodes)
    with through_proxies(nodes) as proxies, asyncio.Runner() as runner:
        for ask in (
            lambda: engine.decide(some, account=ACCOUNT),
            lambda: runner.run(engine.adecide(some, account=ACCOUNT)),
        ):
            before, connections = ask().remaining, [proxy.connections for proxy in proxies]
            for node in current_server().wire._nodes.values():  # type: ignore[attr-defined]
                let_be_old(node, LIFETIME)
            assert ask().remaining == before - 1
            again = [proxy.connections > number for proxy, number in zip(proxies, connections, strict=True)]
            assert sum(again) == NODES


def test_the_slots_of_a_node_that_stays_away_are_found_on_another_node(nodes: Cluster) -> None:
    """No request asks a node that is away, so none is told that another node has the slots now."""
    shard_of_account = home(ACCOUNT)

    def decided() -> bool:
        try:
            return engine.decide([limit(key="user:1")], account=ACCOUNT).allowed
        except NotSent:
            return False

    with through_proxies(nodes) as proxies:
        assert decided()
        away = proxies[nodes.node_of(shard_of_account)]
        away.cut.set()
        away.use(nodes.servers[nodes.node_of(shard_of_account)].port)  # ends its connections
        until(lambda: not decided() and prober.is_active(), "its breaker is open")
        assert not decided()
        with nodes.moved(shard_of_account):
            until(decided, "the node that has the slot now is found")


@pytest.mark.parametrize("provider", [Provider, Streaming])
def test_credentials_of_the_nodes_change_under_load(nodes: Cluster, provider: type[Provider]) -> None:
    nodes.empty()
    some = spread(nodes)
    users = Users([server.port for server in nodes.servers], provider())
    options = {"credential_provider": users.provider, "health_check_interval": 5}
    try:
        with nodes.settings(CONNECTION_POOL_KWARGS=options):
            engine.decide(some, account=ACCOUNT)
            for node in current_server().wire._nodes.values():  # type: ignore[attr-defined]
                assert node._pool.ages.asked == 5, "redis-py's client of a cluster does not know this option"
                if provider is Provider:
                    node._pool.ages.lifetime = 0.0
                    let_be_old(node, LIFETIME_OF_CREDENTIALS)
            with Callers(
                lambda: engine.decide(some, account=ACCOUNT), lambda: engine.adecide(some, account=ACCOUNT)
            ) as callers:
                users.rotate(callers.a_round)
        assert callers.errors == []
    finally:
        users.close()


def test_the_doctor_tries_each_node(cluster: Cluster) -> None:
    diagnoses = diagnose()
    assert [one.findings for one in diagnoses] == [()] * NODES
    assert len({one.address for one in diagnoses}) == NODES
    assert [client.keys() for client in cluster.clients] == [[]] * NODES


def test_the_doctor_names_a_cluster_that_the_cache_does_not_know(cluster: Cluster) -> None:
    with connected(f"redis://127.0.0.1:{cluster.servers[0].port}/0"):
        (one,) = diagnose()
    assert [found.name for found in one.findings] == ["cluster"]
    assert not any(one.works(part) for part in Part)
