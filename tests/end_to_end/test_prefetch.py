from __future__ import annotations

import random

import pytest
from django.db.models import Sum

from ratelimits.engine.server import current_server
from ratelimits.usage.ledger.drain import drain
from ratelimits.usage.ledger.process_totals import declare_unreported
from ratelimits.usage.ledger.seal import seal
from ratelimits.usage.models import DurabilityGap, Line, ProcessTotal
from tests.support.rows import rule
from tests.support.siblings import siblings

PROCESSES, CAPACITY, PREFETCH = 8, 10_000, 64


def in_ledger() -> dict[str, int]:
    """Write all usage to the ledger, and return the number of admitted requests of each key."""
    seal()
    drain()
    return dict(Line.objects.values_list("key").order_by().annotate(Sum("admitted_requests")))


def test_eight_processes_never_spend_one_permit_more_than_the_limit_and_count_each_request(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str], long_run: bool
) -> None:
    trials = 20 if long_run else 2
    # An epoch window of this many seconds began in 2014 and ends in 2036.
    rule("ahead", "fixed_window", key_kind="user", capacity=CAPACITY, period=700_000_000, prefetch=PREFETCH, bills=True)
    with siblings("tests.support.end_to_end.spender", PROCESSES, environment=environment) as processes:
        for process in processes:
            process.ask(trials)
        answers = [process.answer() for process in processes]
    admitted = [sum(trial) for trial in zip(*answers, strict=True)]
    with capsys.disabled():
        print(f"\n{PROCESSES} processes on {CAPACITY:,} permits, {trials} trials: admitted {sorted(set(admitted))}")
    # A process that was refused has no permits left; one that spent slowly lost the permits of its last prefetch.
    least = CAPACITY - PROCESSES * (PREFETCH - 1)
    assert [least <= one <= CAPACITY for one in admitted] == [True] * trials
    assert any(sum(one > 0 for one in trial) > 1 for trial in zip(*answers, strict=True))
    assert in_ledger() == {f"user:{trial}": count for trial, count in enumerate(admitted)}
    assert not DurabilityGap.objects.exists()


def test_a_killed_process_is_never_billed_too_much_and_each_loss_is_declared(
    environment: dict[str, str], capsys: pytest.CaptureFixture[str], long_run: bool
) -> None:
    kills, rng = (50 if long_run else 8), random.Random(14)
    rule("ahead", "fixed_window", key_kind="user", capacity=10**9, period=700_000_000, prefetch=PREFETCH, bills=True)
    acknowledged: dict[str, int] = {}
    with siblings("tests.support.end_to_end.killed", 1, environment=environment) as (killer,):
        for number in range(kills):
            user = f"user:{number}"
            # From one request to many thousand: a process then counts also by its thread.
            killer.ask([user, round(10 ** rng.uniform(0, 4.5))])
            acknowledged[user] = killer.answer()
    ledger = in_ledger()
    declare_unreported(current_server(), range(current_server().keyspace.shards), 2**53)
    rows = ProcessTotal.objects.filter(kind="unreported").values_list("key").order_by()
    declared = dict(rows.annotate(Sum("requests")))
    lost = {user: count - ledger.get(user, 0) for user, count in acknowledged.items()}
    losers = sum(count > 0 for count in lost.values())
    with capsys.disabled():
        print(
            f"\n{kills} kills: {sum(acknowledged.values()):,} requests acknowledged, {sum(ledger.values()):,} in the"
            f" ledger; {losers} processes lost at most {max(lost.values())}; declared {sum(declared.values()):,}"
        )
    # At the moment of the kill, one request may be counted although its process has not seen the answer.
    assert [user for user, count in lost.items() if count < -1] == []
    assert [user for user, count in lost.items() if count > declared.get(user, 0)] == []
    assert max(declared.values(), default=0) < PREFETCH
    assert sum(gap.units or 0 for gap in DurabilityGap.objects.filter(kind="unreported")) == sum(declared.values())
    assert any(count > 0 for count in lost.values())
