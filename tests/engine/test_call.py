"""Test what a call writes apart from the states: counters, receipts, versions and batches."""

from __future__ import annotations

import pickle
import random
import struct
import time
from dataclasses import replace
from typing import Any

import pytest
from redis.exceptions import ResponseError

from ratelimits.algorithms.limits import ALGORITHMS, Mode
from ratelimits.engine import ANY, AlreadySettled, Decision, Limit, Meter, Stale, peek, refund, release, reset, settle
from ratelimits.engine.call import Call, Receipt, Usage
from ratelimits.engine.cluster.split import parts, slot_of
from ratelimits.engine.command import Command
from ratelimits.engine.decide import decide_call as steps
from ratelimits.engine.decide import receipt_call
from ratelimits.engine.keys import shard_of
from ratelimits.engine.program import Term, program
from ratelimits.engine.server import current_server, publish_version
from ratelimits.engine.transport.connection import read_run
from tests.support.engine.asking import KEYS, MONTHS, NOW, SECOND, ask, counted, everything, home, limit, usage
from tests.support.raw import RawRedis

#: The bin and the start of the billing period of NOW, in seconds.
WHERE = f"{NOW // SECOND // 900 * 900}"


def metered(costs: dict[str, int], *limits: Limit, account: str = "acme", **more: Any) -> Decision:
    """Decide a request that is counted in these meters at these costs, under limits of the first meter."""
    terms = tuple(
        Term(
            one.algorithm, one.name, 0, list(costs).index(more.pop(one.name, next(iter(costs)))), one.mode, one.rule, 3
        )
        for one in limits or (limit(capacity=10**12, rate=10**9, rule=7),)
    )
    counters = usage(*(Meter(name, 7, 3) for name in costs), account=account)
    call = Call(program(terms), ("user:1",), tuple(costs.values()), account, counters, now=NOW, **more)
    return steps(current_server(), call)


class TestCounters:
    """Counters per request and meter: "1" for requests of cost 1, "n" for those of another cost, "u" for units."""

    def test_a_request_of_one_unit_is_one_counter(self, redis_client: RawRedis) -> None:
        for _ in range(3):
            metered({"requests": 1})
        assert counted(redis_client) == {f"a|{WHERE}|requests|7|3|acme|user:1|1": 3}

    def test_a_request_of_many_units_is_two(self, redis_client: RawRedis) -> None:
        metered({"requests": 1, "tokens": 250})
        metered({"requests": 1, "tokens": 50})
        assert counted(redis_client) == {
            f"a|{WHERE}|requests|7|3|acme|user:1|1": 2,
            f"a|{WHERE}|tokens|7|3|acme|user:1|n": 2,
            f"a|{WHERE}|tokens|7|3|acme|user:1|u": 300,
        }

    def test_a_request_that_costs_nothing_is_a_request_without_units(self, redis_client: RawRedis) -> None:
        metered({"requests": 0})
        assert counted(redis_client) == {f"a|{WHERE}|requests|7|3|acme|user:1|n": 1}

    def test_a_request_is_counted_once_however_many_rules_it_is_under(self, redis_client: RawRedis) -> None:
        metered({"requests": 1}, *(limit(name=name, rule=number) for number, name in enumerate("abc")))
        assert counted(redis_client) == {f"a|{WHERE}|requests|7|3|acme|user:1|1": 1}

    def test_a_refused_request_names_the_rule_that_refused_it(self, redis_client: RawRedis) -> None:
        tight, wide = limit(name="tight", rule=21, capacity=1), limit(name="wide", rule=22)
        for _ in range(3):
            metered({"requests": 1, "tokens": 30}, wide, tight)
        assert counted(redis_client) == {
            f"a|{WHERE}|requests|7|3|acme|user:1|1": 1,
            f"a|{WHERE}|tokens|7|3|acme|user:1|n": 1,
            f"a|{WHERE}|tokens|7|3|acme|user:1|u": 30,
            f"d|{WHERE}|requests|21|3|acme|user:1|1": 2,
            f"d|{WHERE}|tokens|21|3|acme|user:1|n": 2,
            f"d|{WHERE}|tokens|21|3|acme|user:1|u": 60,
        }

    def test_what_a_shadow_rule_would_refuse_is_admitted_and_told(self, redis_client: RawRedis) -> None:
        shadow = limit(name="shadow", rule=31, capacity=1, mode=Mode.SHADOW)
        answers = [metered({"requests": 1}, limit(rule=30), shadow) for _ in range(3)]
        assert [answer.allowed for answer in answers] == [True] * 3
        assert [answer.standings[1].allowed for answer in answers] == [True, False, False]
        assert [answer.remaining for answer in answers] == [9, 8, 7]
        assert counted(redis_client) == {
            f"a|{WHERE}|requests|7|3|acme|user:1|1": 3,
            f"s|{WHERE}|requests|31|3|acme|user:1|1": 2,
        }

    def test_a_shadow_rule_is_not_charged_by_what_another_refuses(self) -> None:
        shadow = limit(name="shadow", mode=Mode.SHADOW)
        for _ in range(5):
            answer = metered({"requests": 1}, limit(capacity=1), shadow)
        assert (answer.allowed, answer.standings[1].remaining) == (False, 9)

    def test_without_an_account_usage_is_counted_under_its_key(self, redis_client: RawRedis) -> None:
        counters = usage(account="", key="anonymous")
        ask(limit(key="ip:192.0.2.1"), usage=counters)
        (field,) = [name for key in redis_client.keys("*open") for name in redis_client.hkeys(key) if name[:1] != b"#"]
        assert field.decode() == f"a|{WHERE}|requests|0|0||anonymous|1"

    @pytest.mark.parametrize("name", ["a|b", "#c", "t r", "ü", "x\r\ny", "z" * 10_000])
    def test_whatever_a_name_holds_a_field_has_eight_parts(self, redis_client: RawRedis, name: str) -> None:
        ask(limit(key=f"user:{name}"), account=name, usage=usage(name, account=name, key=f"user:{name}"))
        (field,) = counted(redis_client, name)
        assert len(field.split("|")) == 8
        assert len(field) < 600

    def test_a_request_without_meters_is_counted_nowhere(self, redis_client: RawRedis) -> None:
        ask(limit())
        assert redis_client.keys("*open") == []

    def test_a_request_under_no_limit_is_counted(self, redis_client: RawRedis) -> None:
        call = Call(program(()), (), (1,), "acme", usage(), now=NOW)
        answer = steps(current_server(), call)
        assert (answer.allowed, answer.limit, answer.binding, answer.standings) == (True, None, None, ())
        assert counted(redis_client) == {f"a|{WHERE}|requests|0|0|acme|user:1|1": 1}

    def test_counters_never_expire(self, redis_client: RawRedis) -> None:
        metered({"requests": 1})
        kept = [key for key in redis_client.keys("*") if b"}:s:" not in key]
        assert {key.split(b"}:")[1] for key in kept} == {b"head", b"open", b"meta"}
        assert {redis_client.ttl(key) for key in kept} == {-1}

    def test_a_bin_is_a_quarter_of_an_hour(self, redis_client: RawRedis) -> None:
        edge = MONTHS[2]
        for moment in (edge - 1, edge, edge + 900 * SECOND - 1, edge + 900 * SECOND):
            ask(limit(), now=moment, account="acme", usage=usage())
        last = edge // SECOND
        assert counted(redis_client) == {
            f"a|{last - 900}|requests|0|0|acme|user:1|1": 1,
            f"a|{last}|requests|0|0|acme|user:1|1": 2,
            f"a|{last + 900}|requests|0|0|acme|user:1|1": 1,
        }


class TestReceipts:
    def test_a_refund_gives_back_and_counts_all_of_it_once(self, redis_client: RawRedis) -> None:
        receipt = metered({"requests": 1, "tokens": 250}).receipt
        assert receipt is not None
        assert refund(receipt).remaining == 10**12
        with pytest.raises(AlreadySettled):
            refund(receipt)
        with pytest.raises(AlreadySettled):
            settle(receipt, (1, 100))
        assert counted(redis_client) == {
            f"a|{WHERE}|requests|7|3|acme|user:1|1": 1,
            f"a|{WHERE}|tokens|7|3|acme|user:1|n": 1,
            f"a|{WHERE}|tokens|7|3|acme|user:1|u": 250,
            f"r|{WHERE}|requests|7|3|acme|user:1|1": 1,
            f"r|{WHERE}|tokens|7|3|acme|user:1|n": 1,
            f"r|{WHERE}|tokens|7|3|acme|user:1|u": 250,
        }

    def test_a_meter_that_cost_nothing_is_refunded_as_a_request(self, redis_client: RawRedis) -> None:
        receipt = metered({"requests": 1, "tokens": 0}).receipt
        assert receipt is not None
        refund(receipt)
        assert counted(redis_client) == {
            f"a|{WHERE}|requests|7|3|acme|user:1|1": 1,
            f"a|{WHERE}|tokens|7|3|acme|user:1|n": 1,
            f"r|{WHERE}|requests|7|3|acme|user:1|1": 1,
            f"r|{WHERE}|tokens|7|3|acme|user:1|n": 1,
        }

    @pytest.mark.parametrize(
        ("true", "field", "units"),
        [(312, "a", 62), (200, "r", 50), (251, "a", 1), (249, "r", 1), (0, "r", 250)],
    )
    def test_settling_counts_the_difference_in_units(
        self, redis_client: RawRedis, true: int, field: str, units: int
    ) -> None:
        receipt = metered({"requests": 1, "tokens": 250}).receipt
        assert receipt is not None
        before = counted(redis_client)
        settle(receipt, (1, true))
        name = f"{field}|{WHERE}|tokens|7|3|acme|user:1|u"
        assert counted(redis_client) == before | {name: before.get(name, 0) + units}

    def test_settling_at_what_was_charged_counts_nothing_and_is_once_too(self, redis_client: RawRedis) -> None:
        receipt = metered({"requests": 1, "tokens": 250}).receipt
        assert receipt is not None
        before = counted(redis_client)
        settle(receipt, (1, 250))
        assert counted(redis_client) == before
        with pytest.raises(AlreadySettled):
            refund(receipt)

    def test_settling_charges_what_was_used_even_over_the_limit(self) -> None:
        bucket = limit(cost=4)
        receipt = ask(bucket).receipt
        assert receipt is not None
        answer = settle(receipt, (25,))
        assert (answer.allowed, answer.remaining) == (True, 0)

    def test_settling_takes_a_cost_for_each_that_was_charged(self) -> None:
        receipt = metered({"requests": 1, "tokens": 250}).receipt
        assert receipt is not None
        with pytest.raises(ValueError, match=r"for each of the 2 charged costs$"):
            settle(receipt, (5,))

    def test_a_refused_request_has_no_receipt(self) -> None:
        ask(limit(capacity=1))
        assert ask(limit(capacity=1)).receipt is None

    def test_a_receipt_can_be_kept_and_used_in_another_process(self) -> None:
        receipt = metered({"requests": 1}, limit(cost=5)).receipt
        kept = pickle.dumps(receipt)
        assert len(kept) < 2000
        assert pickle.loads(kept) == receipt
        assert refund(pickle.loads(kept)).remaining == 10
        assert receipt is not None
        with pytest.raises(AlreadySettled):
            refund(receipt)

    def test_two_receipts_of_one_lease_name_are_two(self) -> None:
        places = limit("concurrency", capacity=3)
        first, second = (ask(places, now=None, lease="job").receipt for _ in range(2))
        assert first is not None
        assert second is not None
        refund(first)
        refund(second)
        with pytest.raises(AlreadySettled):
            refund(second)

    def test_the_name_of_a_lease_never_names_a_batch(self, redis_client: RawRedis) -> None:
        incarnations = set()
        for _ in range(3):
            redis_client.flushdb()
            ask(limit("concurrency"), account="acme", usage=usage(), lease="job")
            (meta,) = redis_client.keys("*meta")
            incarnations.add(redis_client.hget(meta, "incarnation"))
        assert len(incarnations) == 3

    def test_releasing_ends_the_leases_of_a_receipt_and_of_no_other(self) -> None:
        places = limit("concurrency", capacity=2)
        first, second = (ask(places, now=None).receipt for _ in range(2))
        assert first is not None
        assert second is not None
        assert [release(one).remaining for one in (first, first, second)] == [1, 1, 2]

    def test_a_refund_gives_back_nothing_of_a_later_window(self) -> None:
        now = time.time_ns() // 1000
        window = limit("fixed_window", period=60, window_start="first_hit")
        earlier, later = ask(window, now=now - 120 * SECOND).receipt, ask(window, now=now).receipt
        assert earlier is not None
        assert later is not None
        assert [refund(one).remaining for one in (earlier, later)] == [9, 10]

    def test_a_receipt_is_good_for_its_time_and_not_again_after_it(self, settings: Any, redis_client: RawRedis) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "RECEIPT_TTL": 3600}
        bucket = limit(rate=1, period=86_400)
        old = ask(bucket, now=None).receipt
        assert old is not None
        with pytest.raises(AlreadySettled, match="older than RECEIPT_TTL"):
            refund(replace(old, at=old.at - 3_601 * SECOND))
        refund(old)
        (key,) = redis_client.keys("*}:receipts")
        assert redis_client.zrange(key, 0, -1, withscores=True) == [(old.nonce.encode(), old.at + 3_600 * SECOND)]
        assert redis_client.ttl(key) == -1

    def test_a_receipt_is_used_once_however_the_clock_jumps(self, settings: Any, redis_client: RawRedis) -> None:
        """Use receipts while the clock jumps over RECEIPT_TTL and back: none is used twice, and the set stays small."""
        settings.RATELIMITS = {**settings.RATELIMITS, "RECEIPT_TTL": 3600}
        draw, now, used, refused = random.Random(8), time.time_ns() // 1000, set[str](), 0
        bucket, live, later = limit(capacity=10_000, rate=1, period=60), list[Receipt](), now + 10**9 * SECOND
        for step in range(150):
            jump = draw.choice((0, 0, 3_601, 86_400, 10**8, -3_601, -10)) * SECOND
            receipt = ask(bucket, now=now + step * SECOND).receipt
            assert receipt is not None
            live.append(receipt)
            for chosen in (receipt, draw.choice(live), live[0]):
                call = receipt_call(chosen, (0,), 3600, whole=True)._replace(now=now + step * SECOND + jump)
                try:
                    steps(current_server(), call)
                except AlreadySettled:
                    refused += 1
                else:
                    assert chosen.nonce not in used
                    used.add(chosen.nonce)
        assert used
        assert refused
        # Long after that, each use removes two of them.
        for _use in range(len(used)):
            last = ask(bucket, now=later).receipt
            assert last is not None
            steps(current_server(), receipt_call(last, (0,), 3600)._replace(now=later))
        (key,) = redis_client.keys("*}:receipts")
        assert redis_client.zcard(key) <= len(used) + 1
        assert all(
            score >= (now + 10**9 * SECOND) for _nonce, score in redis_client.zrange(key, 1, -1, withscores=True)
        )
        for chosen in (receipt for receipt in live if receipt.nonce in used):
            with pytest.raises(AlreadySettled):
                steps(current_server(), receipt_call(chosen, (0,), 3600)._replace(now=chosen.at + SECOND))


def heads(client: RawRedis) -> dict[bytes, bytes]:
    return {key: client.get(key) for key in client.keys("*}:head")}


def version_of(client: RawRedis, owner: str) -> int:
    return int(client.get(KEYS.head(shard_of(owner, KEYS.shards))).split()[0])


def asked_at(version: int, *keys: str, **more: Any) -> Decision:
    return ask(*(limit(key=key, version=version, rule=1) for key in keys or ("user:1",)), **more)


class TestVersions:
    def test_the_first_decision_stores_the_version_it_was_made_under_and_the_servers_run(
        self, redis_client: RawRedis
    ) -> None:
        asked_at(5)
        assert heads(redis_client) == {
            KEYS.head(shard_of("user:1", KEYS.shards)).encode(): f"5 {read_run(redis_client)}".encode()
        }

    def test_a_newer_version_is_stored_and_the_older_process_then_is_stale(self, redis_client: RawRedis) -> None:
        asked_at(5)
        asked_at(7)
        with pytest.raises(Stale) as caught:
            asked_at(6)
        assert (caught.value.version, version_of(redis_client, "user:1")) == (7, 7)

    def test_a_stale_decision_changes_nothing_at_all(self, redis_client: RawRedis) -> None:
        near, far = "user:1", "ip:192.0.2.1"
        limits = [limit(name, key=key, name=name, version=9) for name in ALGORITHMS for key in (near, far)]
        ask(*limits, account="acme", usage=usage(), timeout=ANY)
        # One of the shards knows of an edit, another does not yet.
        redis_client.set(KEYS.head(shard_of(far, KEYS.shards)), f"12 {read_run(redis_client)}")
        before = everything(redis_client)
        for function in (ask, lambda *which, usage, **more: peek(which, now=NOW, **more)):
            with pytest.raises(Stale):
                function(*(replace(one, version=11) for one in limits), account="acme", usage=usage(), timeout=ANY)
        assert everything(redis_client) == before

    def test_a_published_version_holds_in_shards_that_were_never_touched(self, redis_client: RawRedis) -> None:
        assert publish_version(4) == 4
        assert len(heads(redis_client)) == KEYS.shards
        for number in range(100):
            with pytest.raises(Stale):
                asked_at(3, f"user:{number}")
        assert asked_at(4).allowed
        assert asked_at(5).allowed

    def test_publishing_never_takes_a_version_back(self, redis_client: RawRedis) -> None:
        asked_at(9)
        assert publish_version(4) == 9
        assert version_of(redis_client, "user:1") == 9
        with pytest.raises(Stale):
            asked_at(8)

    def test_publishing_keeps_the_run(self, redis_client: RawRedis) -> None:
        asked_at(3)
        publish_version(4)
        assert redis_client.get(KEYS.head(shard_of("user:1", KEYS.shards))).decode() == f"4 {read_run(redis_client)}"

    def test_what_was_admitted_can_be_given_back_under_any_version(self) -> None:
        given, used, leased = (
            ask(limit("concurrency", name=name, version=3, rule=1), now=None).receipt for name in "abc"
        )
        assert given is not None
        assert used is not None
        assert leased is not None
        publish_version(8)
        assert refund(given).remaining == 10
        assert settle(used, (4,)).remaining == 6
        assert release(leased).remaining == 10
        assert reset([limit("concurrency", name="b", version=3)]).allowed
        with pytest.raises(Stale):
            asked_at(7)

    def test_limits_of_no_configuration_are_never_stale_and_tell_of_no_version(self, redis_client: RawRedis) -> None:
        publish_version(8)
        before = heads(redis_client)
        run = read_run(redis_client).encode()
        assert [ask(limit()).remaining for _ in range(3)] == [9, 8, 7]
        touched = KEYS.head(shard_of("user:1", KEYS.shards)).encode()
        assert heads(redis_client) == before | {touched: b"8 " + run}

    def test_a_head_that_cannot_be_read_is_as_none_at_all(self, redis_client: RawRedis) -> None:
        head = KEYS.head(shard_of("user:1", KEYS.shards))
        for garbage in ("", "garbage", "x 5"):
            redis_client.set(head, garbage)
            assert asked_at(5).allowed
            assert version_of(redis_client, "user:1") == 5
            redis_client.set(head, garbage)
            publish_version(6)
            assert version_of(redis_client, "user:1") == 6


class TestUncounted:
    """A request that is not counted has a usage all the same: it names its meters, and the shard that is asked."""

    @pytest.fixture(params=["acme", ""])
    def uncounted(self, request: pytest.FixtureRequest) -> Usage:
        return usage("requests", "tokens", account=request.param, key="user:1")._replace(counted=False)

    def test_it_is_charged_and_refunded_and_no_batch_is_opened(self, uncounted: Usage, redis_client: RawRedis) -> None:
        term = Term(limit(capacity=500).algorithm, "tokens", 0, 1)
        call = Call(program((term,)), ("ip:192.0.2.1",), (1, 250), uncounted.account, uncounted, now=NOW)
        decisions = [steps(current_server(), call) for _ in range(3)]
        assert [decision.remaining for decision in decisions] == [250, 0, 0]
        receipt = decisions[0].receipt
        assert receipt is not None
        assert (receipt.bin, receipt.usage) == (0, uncounted)
        assert settle(receipt, (1, 200)).remaining == 50
        with pytest.raises(AlreadySettled):
            refund(receipt)
        assert redis_client.keys("*}:open") == []

    def test_without_limits_it_is_told_of_newer_rules_and_refunded_once(self, uncounted: Usage) -> None:
        call = Call(program(()), (), (1, 250), uncounted.account, uncounted, version=3, now=NOW)
        receipt = steps(current_server(), call).receipt
        assert receipt is not None
        assert refund(receipt).allowed
        with pytest.raises(AlreadySettled):
            refund(receipt)
        publish_version(4)
        with pytest.raises(Stale):
            steps(current_server(), call)

    def test_a_cluster_is_asked_where_its_limits_are_or_else_once(self, uncounted: Usage) -> None:
        limits = program((Term(limit().algorithm, "burst", 0, 0),))
        key = "ip:192.0.2.1"
        with_limits = Call(limits, (key,), (1, 250), uncounted.account, uncounted)
        without = with_limits._replace(program=program(()), keys=())
        home_shard = shard_of(f"account:{uncounted.account}" if uncounted.account else "user:1", KEYS.shards)
        for call, shard in ((with_limits, shard_of(key, KEYS.shards)), (without, home_shard)):
            assert [part.slot for part in parts(Command(KEYS, call))] == [slot_of(KEYS, shard)]


class TestRuns:
    """After a restart the server may have forgotten counts: the batch of the old run ends, a new incarnation begins."""

    def test_the_open_batch_of_another_run_is_sealed_and_a_new_incarnation_begins(self, redis_client: RawRedis) -> None:
        shard = home("acme")
        metered({"requests": 1})
        before = redis_client.hgetall(KEYS.meta(shard))
        for key in (KEYS.head(shard), KEYS.meta(shard), KEYS.open(shard)):
            _pretend_another_run(redis_client, key)
        metered({"requests": 1})
        (sealed,) = redis_client.lrange(KEYS.sealed(shard), 0, -1)
        batch = redis_client.hgetall(KEYS.batch(shard, sealed.decode()))
        after = redis_client.hgetall(KEYS.meta(shard))
        opened = redis_client.hgetall(KEYS.open(shard))
        assert sealed == before[b"incarnation"] + b":1"
        assert (batch[b"#r"], batch[b"#x"].decode()) == (b"other:run", read_run(redis_client))
        assert (after[b"seq"], after[b"run"].decode()) == (b"1", read_run(redis_client))
        assert after[b"incarnation"] == opened[b"#i"] != before[b"incarnation"]
        assert opened[b"#f"] == sealed
        assert counted(redis_client) == {f"a|{WHERE}|requests|7|3|acme|user:1|1": 1}

    def test_a_shard_without_usage_is_not_sealed(self, redis_client: RawRedis) -> None:
        ask(limit())
        _pretend_another_run(redis_client, KEYS.head(shard_of("user:1", KEYS.shards)))
        ask(limit())
        assert redis_client.keys("*sealed") == []

    def test_a_batch_is_opened_once_and_numbered_on(self, redis_client: RawRedis) -> None:
        shard = home("acme")
        for _ in range(3):
            metered({"requests": 1})
        opened = redis_client.hgetall(KEYS.open(shard))
        assert (opened[b"#s"], opened[b"#p"], opened[b"#o"]) == (b"1", b"0", b"%d" % NOW)
        assert redis_client.hget(KEYS.meta(shard), "incarnation") == opened[b"#i"]

    @pytest.mark.parametrize("usual", [True, False])
    def test_a_batch_of_1000_fields_is_sealed_by_the_call_that_fills_it(
        self, redis_client: RawRedis, usual: bool
    ) -> None:
        shard = home("acme")
        one = limit("token_bucket" if usual else "sliding_log", capacity=10**6, rate=10**6)
        for _ in range(2):
            ask(one, account="acme", usage=usage("requests", "tokens", key="user:first"))
        redis_client.hset(KEYS.open(shard), mapping={f"a|0|m|0|0|acme|user:{n}|1": 1 for n in range(989)})
        assert redis_client.hlen(KEYS.open(shard)) == 998
        ask(one, account="acme", usage=usage("requests", "tokens", key="user:last"))
        (sealed,) = redis_client.lrange(KEYS.sealed(shard), 0, -1)
        batch = redis_client.hgetall(KEYS.batch(shard, sealed.decode()))
        assert len(batch) == 1000 + 3
        assert batch[b"#c"] == b"%d" % (2 * (989 + 6))
        assert not redis_client.exists(KEYS.open(shard))
        ask(one, account="acme", usage=usage("requests", "tokens", key="user:next"))
        opened = redis_client.hgetall(KEYS.open(shard))
        assert (opened[b"#s"], opened[b"#p"]) == (b"2", batch[b"#c"])
        assert opened[b"#q"] == b"995"  # requests alone, while "#p" is the sum of requests and units
        assert len(opened) == 2 + 7


def _pretend_another_run(client: RawRedis, key: str) -> None:
    if client.type(key) == b"hash":
        client.hset(key, "#r" if key.endswith("open") else "run", "other:run")
    else:
        client.set(key, client.get(key).split()[0] + b" other:run")


class TestCorruption:
    """Data that cannot be read is an error that says where it is and what to do, and nothing is lost."""

    GARBAGE = (b"garbage of no kind at all", b"\x00" * 40, b"\xff" * 7, b"\x00\x00\x00\x00\x01\x02\x03")

    @pytest.mark.parametrize("garbage", GARBAGE)
    def test_garbage_is_reported_with_its_key_and_left_alone(self, redis_client: RawRedis, garbage: bytes) -> None:
        key = KEYS.state(shard_of("user:1", KEYS.shards), "user:1")
        redis_client.set(key, garbage)
        for function in (lambda: ask(limit()), lambda: ask(limit("smooth_bursty")), lambda: peek([limit()], now=NOW)):
            with pytest.raises(ResponseError, match=r"^CORRUPT the state at \S*:s:user:1 cannot be read: reset or"):
                function()
        assert redis_client.get(key) == garbage

    @pytest.mark.parametrize("algorithm", ALGORITHMS)
    def test_a_record_of_the_wrong_form_is_reported(self, redis_client: RawRedis, algorithm: str) -> None:
        one = limit(algorithm)
        ask(one, timeout=ANY)
        (key,) = (key for key in redis_client.keys("*") if redis_client.type(key) == b"string" and b"head" not in key)
        raw = redis_client.get(key)
        # A record of the same algorithm, but of only three bytes.
        redis_client.set(key, raw[:9] + b"\x03\x00" + raw[11:15] + b"\xc1\xc1\xc1")
        with pytest.raises(ResponseError, match=r"^CORRUPT the state at "):
            ask(one, timeout=ANY)
        reset([one])
        assert ask(one, timeout=ANY).allowed

    def test_a_record_of_an_algorithm_that_only_a_newer_version_has_is_kept(self, redis_client: RawRedis) -> None:
        key = KEYS.state(shard_of("user:1", KEYS.shards), "user:1")
        for algorithm in ("token_bucket", "sliding_log"):
            ask(limit(algorithm, name=algorithm))
            newer = struct.pack("<IBHI", 7, 200, 3, 2**32 - 1) + b"new"
            redis_client.set(key, redis_client.get(key) + newer)
            assert ask(limit(algorithm, name=algorithm)).remaining == 8
            assert newer in redis_client.get(key)
            redis_client.delete(key)

    @pytest.mark.parametrize(
        "limits", [[limit()], [limit("sliding_log")], [limit(), limit(key="user:2")]], ids=["one", "own", "two"]
    )
    def test_a_key_of_another_kind_is_reported_and_can_be_reset(
        self, redis_client: RawRedis, limits: list[Limit]
    ) -> None:
        key = KEYS.state(shard_of("user:1", KEYS.shards), "user:1")
        redis_client.rpush(key, "a list")
        with pytest.raises(ResponseError, match=r"^CORRUPT the state at \S*:s:user:1 cannot be read: reset or"):
            ask(*limits, usage=usage())
        # Nothing was charged, and nothing was counted.
        assert [name for name in redis_client.keys("*") if not name.endswith(b":head")] == [key.encode()]
        assert redis_client.lrange(key, 0, -1) == [b"a list"]
        reset(limits)
        assert ask(*limits).remaining == 9

    def test_the_first_request_of_a_limit_is_decided_by_two_commands(self, redis_client: RawRedis) -> None:
        ask(limit())
        redis_client.delete(KEYS.state(shard_of("user:1", KEYS.shards), "user:1"))
        redis_client.config_resetstat()
        ask(limit())
        commands = {name.removeprefix("cmdstat_").partition("|")[0] for name in redis_client.info("commandstats")}
        assert commands - {"config", "evalsha", "script"} == {"mget", "set"}
