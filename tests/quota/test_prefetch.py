from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from ratelimits.algorithms.limits import ALGORITHMS
from ratelimits.embedded import free_port
from ratelimits.engine.server import Server, current_server
from ratelimits.quota import spending
from ratelimits.quota.prefetch import DRIFT, MARGIN
from ratelimits.quota.spending import send_and_give_back
from ratelimits.usage.counting import process_totals
from tests.support.engine.asking import NOW, SECOND, limit
from tests.support.engine.proxy import Proxy
from tests.support.entry_points import Clock, away, begin_afresh, short_timeout
from tests.support.quota.prefetching import Process, call
from tests.support.servers import TestServers


@pytest.fixture(autouse=True)
def _begin_afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget the permits that other tests have prefetched, because the server was emptied."""
    begin_afresh(monkeypatch)
    yield
    spending.clear()
    process_totals._forget_all()


def _server_at(settings: Any, port: int) -> Server:
    """Use another port for the server of the limits."""
    away(settings, port)
    return current_server()


def test_what_is_asked_for_doubles_while_it_is_spent() -> None:
    process = Process(call(), most=16)
    assert all(process.request() for _ in range(63))
    assert process.sizes == [1, 2, 4, 8, 16, 16, 16]


def test_no_more_is_asked_for_than_was_spent_the_last_time() -> None:
    process = Process(call(), most=64)
    assert all(process.request() for _ in range(31 + 5))
    assert process.sizes == [1, 2, 4, 8, 16, 32]
    process.clock.now += 1.1
    assert process.request()
    assert process.sizes[-1] == 4  # five of 32 were spent


def test_most_need_not_be_a_power_of_two() -> None:
    process = Process(call(), most=10)
    assert all(process.request() for _ in range(40))
    assert max(process.sizes) == 8


def test_the_last_permits_are_asked_for_one_by_one() -> None:
    process = Process(call(capacity=20), most=64)
    assert [process.request() for _ in range(22)] == [True] * 20 + [False] * 2
    assert max(process.sizes) == 2  # an eighth of what is left, so that others get some


def test_what_others_took_meanwhile_is_not_refused_to_the_one_request() -> None:
    mine, theirs = Process(call(capacity=100)), Process(call(capacity=100))
    for _ in range(7):
        assert mine.request()
    admitted = sum(theirs.request() for _ in range(200))
    admitted += 7 + sum(mine.request() for _ in range(200))
    assert admitted == 100


def test_a_request_that_costs_more_takes_more() -> None:
    process = Process(call(capacity=1000, cost=10), most=64)
    assert sum(process.request() for _ in range(150)) == 100


def test_it_ends_after_its_seconds() -> None:
    process = Process(call(), seconds=0.5)
    for _ in range(4):
        assert process.request()
    process.clock.now += 0.49
    asked = len(process.takes)
    assert [process.request() for _ in range(3)] == [True] * 3
    assert len(process.takes) == asked
    process.clock.now += 0.02
    process.request()
    assert len(process.takes) == asked + 1


def test_it_ends_before_its_window_does() -> None:
    process = Process(call(period=60), seconds=3600)
    left = 60 - NOW % (60 * SECOND) / SECOND
    for _ in range(5):
        assert process.request()
    early = left * DRIFT + MARGIN
    process.clock.now += left - early - MARGIN
    asked = len(process.takes)
    assert process.request()
    assert len(process.takes) == asked
    process.clock.now += 1.5 * MARGIN
    process.request()
    assert len(process.takes) == asked + 1


def test_what_was_not_spent_in_time_is_given_back() -> None:
    process = Process(call(capacity=100))
    assert all(process.request() for _ in range(6))
    assert process.left() == 100 - 7
    send_and_give_back()
    assert process.left() == 100 - 7
    process.clock.now += 1.1
    send_and_give_back()
    send_and_give_back()
    assert process.left() == 100 - 6
    assert process.request()
    assert process.left() == 100 - 6 - 2


@pytest.mark.parametrize("is_counted", [True, False])
def test_what_is_given_back_is_not_spent_by_a_thread_that_read_the_clock_earlier(is_counted: bool) -> None:
    asked = call(capacity=100)
    assert asked.usage is not None
    process = Process(asked._replace(usage=asked.usage._replace(counted=is_counted)))
    assert all(process.request() for _ in range(6))
    before, meanwhile = process.clock.now, [send_and_give_back]

    def clock() -> float:
        if not meanwhile:
            return process.clock.now
        process.clock.now = before + 1.1
        meanwhile.pop()()
        return before

    process.permits.clock = clock
    prefetch = process.permits._current
    assert prefetch is not None
    spent = process.permits.spend()
    assert (spent, process.left()) == (None, 100 - 6)
    assert not prefetch.unspent


def test_nothing_is_given_back_into_another_window() -> None:
    process = Process(call(capacity=100, period=2), seconds=60)
    assert all(process.request() for _ in range(6))
    process.clock.now += 2
    assert all(process.request() for _ in range(3))
    before = process.left()
    send_and_give_back()
    assert process.left() == before


def test_a_process_that_ends_gives_everything_back_and_spends_no_more() -> None:
    process = Process(call(capacity=100))
    assert all(process.request() for _ in range(5))
    send_and_give_back(everything=True)
    assert process.left() == 100 - 5
    assert process.permits.spend() is None


def test_what_could_not_be_sent_is_given_back_later(servers: TestServers, settings: Any) -> None:
    process = Process(call(capacity=100))
    assert all(process.request() for _ in range(5))
    assert process.left() == 100 - 7
    process.permits.server = _server_at(settings, free_port())
    send_and_give_back(everything=True)
    process.permits.server = _server_at(settings, servers.redis.port)
    assert process.left() == 100 - 7
    send_and_give_back(everything=True)
    assert process.left() == 100 - 5


def test_nothing_more_is_tried_once_the_server_does_not_answer(servers: TestServers, settings: Any) -> None:
    processes = [Process(call(key=f"user:{number}")) for number in range(10)]
    assert all(process.request() for process in processes for _ in range(2))
    with Proxy(servers.redis.port) as proxy:
        with short_timeout(settings):
            hanging = _server_at(settings, proxy.port)
        for process in processes:
            process.permits.server = hanging
        proxy.lose.set()
        send_and_give_back(everything=True)
        assert proxy.count(b"EVALSHA") <= 1
        proxy.lose.clear()
        send_and_give_back(everything=True)
    away(settings, servers.redis.port)
    # The reply of one may have been lost; it is not sent again.
    assert sum(process.left() < 1000 - 2 for process in processes) <= 1


def test_bursts_lose_nothing_in_the_long_run() -> None:
    process, admitted = Process(call(capacity=200)), 0
    for _ in range(20):
        admitted += sum(process.request() for _ in range(16))
        process.clock.now += 1.1
        send_and_give_back()
    assert admitted == 200


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(1, 60),
    most=st.integers(1, 70),
    steps=st.lists(
        st.tuples(st.integers(0, 3), st.sampled_from([0, 0.001, 0.3, 1.5]), st.integers(1, 30)), max_size=25
    ),
)
def test_processes_together_never_spend_more_than_a_window_holds(
    capacity: int, most: int, steps: list[tuple[int, float, int]]
) -> None:
    period, clock = 2, Clock()
    asked = call(capacity, period, key=f"user:{os.urandom(8).hex()}")
    processes = [Process(asked, most, 10, clock) for _ in range(4)]
    spent: dict[int, int] = {}
    for number, seconds, requests in steps:
        clock.now += seconds
        process = processes[number]
        send_and_give_back()
        for _ in range(requests):
            window = process.now() // (period * SECOND)
            spent[window] = spent.get(window, 0) + process.request()
    assert max(spent.values(), default=0) <= capacity


def test_a_child_of_a_fork_holds_nothing() -> None:
    process = Process(call())
    for _ in range(4):
        assert process.request()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(theirs, b"spent" if process.permits.spend() else b"none")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(ours, 4) == b"none"
    assert process.permits.spend() is not None
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_only_windows_that_lie_where_the_clock_says_lend_themselves_to_it(algorithm: str) -> None:
    assert limit(algorithm).algorithm.may_prefetch == (algorithm in ("fixed_window", "calendar_window"))
    if algorithm == "fixed_window":
        assert not limit(algorithm, window_start="first_hit").algorithm.may_prefetch


def test_sizes_are_powers_of_two() -> None:
    process = Process(call(capacity=10**6), most=1000)
    for _ in range(3000):
        process.request()
    assert all(later in (size, 2 * size) for size, later in pairwise(process.sizes))
