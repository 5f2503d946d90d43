"""What a call asks and leaves behind beside the states: counters, receipts, versions and batches."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import redis

from ratelimits.engine import AlreadySettled, Decision, Limit, Meter, refund, release, settle
from ratelimits.engine.call import Call
from ratelimits.engine.decide import ask as steps
from ratelimits.engine.decide import run
from ratelimits.engine.limits import Mode
from ratelimits.engine.program import Term, program
from ratelimits.engine.server import server
from tests.engine.asking import MONTHS, NOW, SECOND, ask, counted, limit, usage

#: Bin and billing period of NOW, in seconds.
WHERE = f"{NOW // SECOND // 900 * 900}|{MONTHS[1] // SECOND}"


def metered(costs: dict[str, int], *limits: Limit, account: str = "acme", **more: Any) -> Decision:
    """A request counted by these meters at these costs, under limits of the first meter."""
    terms = tuple(
        Term(
            one.algorithm, one.name, 0, list(costs).index(more.pop(one.name, next(iter(costs)))), one.mode, one.rule, 3
        )
        for one in limits or (limit(capacity=10**12, rate=10**9, rule=7),)
    )
    counters = usage(*(Meter(name, 7, 3) for name in costs), account=account)
    call = Call(program(terms), ("user:1",), tuple(costs.values()), account, counters, now=NOW, **more)
    return run(server(), steps(server(), call))


class TestCounters:
    """Once per request and meter: "1" requests that cost 1, "n" requests of any other cost, "u" their units."""

    def test_a_request_of_one_unit_is_one_counter(self, redis_client: redis.Redis) -> None:
        for _ in range(3):
            metered({"requests": 1})
        assert counted(redis_client) == {f"a|{WHERE}|requests|7|3|acme|user:1|1": 3}

    def test_a_request_of_many_units_is_two(self, redis_client: redis.Redis) -> None:
        metered({"requests": 1, "tokens": 250})
        metered({"requests": 1, "tokens": 50})
        assert counted(redis_client) == {
            f"a|{WHERE}|requests|7|3|acme|user:1|1": 2,
            f"a|{WHERE}|tokens|7|3|acme|user:1|n": 2,
            f"a|{WHERE}|tokens|7|3|acme|user:1|u": 300,
        }

    def test_a_request_that_costs_nothing_is_a_request_without_units(self, redis_client: redis.Redis) -> None:
        metered({"requests": 0})
        assert counted(redis_client) == {f"a|{WHERE}|requests|7|3|acme|user:1|n": 1}

    def test_a_request_is_counted_once_however_many_rules_it_is_under(self, redis_client: redis.Redis) -> None:
        metered({"requests": 1}, *(limit(name=name, rule=number) for number, name in enumerate("abc")))
        assert counted(redis_client) == {f"a|{WHERE}|requests|7|3|acme|user:1|1": 1}

    def test_a_refused_request_names_the_rule_that_refused_it(self, redis_client: redis.Redis) -> None:
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

    def test_what_a_shadow_rule_would_refuse_is_admitted_and_told(self, redis_client: redis.Redis) -> None:
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

    def test_without_an_account_usage_is_counted_under_its_key(self, redis_client: redis.Redis) -> None:
        counters = usage(account="", key="anonymous")
        ask(limit(key="ip:192.0.2.1"), usage=counters)
        (field,) = [name for key in redis_client.keys("*open") for name in redis_client.hkeys(key) if name[:1] != b"#"]
        assert field.decode() == f"a|{WHERE}|requests|0|0||anonymous|1"

    @pytest.mark.parametrize("name", ["a|b", "#c", "t r", "ü", "x\r\ny", "z" * 300])
    def test_whatever_a_name_holds_a_field_has_nine_parts(self, redis_client: redis.Redis, name: str) -> None:
        ask(limit(key=f"user:{name}"), account=name, usage=usage(name, account=name, key=f"user:{name}"))
        (field,) = counted(redis_client, name)
        assert len(field.split("|")) == 9
        assert len(field) < 400

    def test_a_request_without_meters_is_counted_nowhere(self, redis_client: redis.Redis) -> None:
        ask(limit())
        assert redis_client.keys("*open") == []

    def test_a_request_under_no_limit_is_counted(self, redis_client: redis.Redis) -> None:
        call = Call(program(()), (), (1,), "acme", usage(), now=NOW)
        answer = run(server(), steps(server(), call))
        assert (answer.allowed, answer.limit, answer.binding, answer.standings) == (True, None, None, ())
        assert counted(redis_client) == {f"a|{WHERE}|requests|0|0|acme|user:1|1": 1}

    def test_counters_never_expire(self, redis_client: redis.Redis) -> None:
        metered({"requests": 1})
        kept = [key for key in redis_client.keys("*") if b"}:s:" not in key]
        assert {key.split(b"}:")[1] for key in kept} == {b"head", b"open", b"meta"}
        assert [redis_client.ttl(key) for key in kept] == [-1] * 3

    def test_a_bin_is_a_quarter_of_an_hour_and_a_period_that_of_the_account(self, redis_client: redis.Redis) -> None:
        edge = MONTHS[2]
        for moment in (edge - 1, edge, edge + 900 * SECOND - 1, edge + 900 * SECOND):
            ask(limit(), now=moment, account="acme", usage=usage())
        last = edge // SECOND
        assert counted(redis_client) == {
            f"a|{last - 900}|{MONTHS[1] // SECOND}|requests|0|0|acme|user:1|1": 1,
            f"a|{last}|{last}|requests|0|0|acme|user:1|1": 2,
            f"a|{last + 900}|{last}|requests|0|0|acme|user:1|1": 1,
        }

    def test_a_moment_outside_the_periods_that_were_given_is_counted_in_its_own(
        self, redis_client: redis.Redis
    ) -> None:
        ask(limit(), now=MONTHS[3] + 40 * 86_400 * SECOND, account="acme", usage=usage())
        (field,) = counted(redis_client)
        assert field.split("|")[2] == str(1_806_537_600)


class TestReceipts:
    def test_a_refund_gives_back_and_counts_all_of_it_once(self, redis_client: redis.Redis) -> None:
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

    def test_a_meter_that_cost_nothing_is_refunded_as_a_request(self, redis_client: redis.Redis) -> None:
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
        self, redis_client: redis.Redis, true: int, field: str, units: int
    ) -> None:
        receipt = metered({"requests": 1, "tokens": 250}).receipt
        assert receipt is not None
        before = counted(redis_client)
        settle(receipt, (1, true))
        name = f"{field}|{WHERE}|tokens|7|3|acme|user:1|u"
        assert counted(redis_client) == before | {name: before.get(name, 0) + units}

    def test_settling_at_what_was_charged_counts_nothing_and_is_once_too(self, redis_client: redis.Redis) -> None:
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
        with pytest.raises(ValueError, match=r"^settle with 2 whole costs"):
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

    def test_the_name_of_a_lease_never_names_a_batch(self, redis_client: redis.Redis) -> None:
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

    def test_a_receipt_is_good_for_its_time_and_not_again_after_it(
        self, settings: Any, redis_client: redis.Redis
    ) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "RECEIPT_TTL": 3600}
        bucket = limit(rate=1, period=86_400)
        old = ask(bucket, now=None).receipt
        assert old is not None
        with pytest.raises(AlreadySettled, match="older than RECEIPT_TTL"):
            refund(replace(old, at=old.at - 3_601 * SECOND))
        refund(old)
        (key,) = redis_client.keys("*}:r:*")
        assert 3_590_000 < redis_client.pttl(key) <= 3_600_000
