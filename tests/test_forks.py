"""Test that a forked child never waits for a lock that a thread of its parent held, nor keeps what was its parent's."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from ratelimits import rules
from ratelimits.algorithms.limits import algorithm_from_json
from ratelimits.engine.cluster import wire
from ratelimits.identity import Identity
from ratelimits.quota import waiting, without_decision
from ratelimits.rules import snapshot
from tests.support.rows import rule

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]

WHO = Identity("user:1", None, "account:acme", "ip:203.0.113.9")
#: Seconds after which the system ends a child that waits for a lock which nobody will ever give back.
HUNG = 30


def in_a_child(do: Callable[[], object]) -> bool:
    """Fork a child that does this, and return whether it returned something true."""
    child = os.fork()
    if child == 0:
        signal.alarm(HUNG)
        try:
            if do():
                os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def test_a_child_finds_its_rules_whatever_its_parent_was_doing() -> None:
    rule("burst", capacity=2)
    rules.forget()
    current = rules.current().with_rows_of(WHO)
    with snapshot._lock:
        assert in_a_child(lambda: current.select("*", "PUT", WHO).rules)


def test_a_child_forgets_its_rules_whatever_its_parent_was_doing() -> None:
    loader = rules._loader

    def forgotten() -> bool:
        loader.forget()
        return loader._current is None

    with loader._lock:
        assert in_a_child(forgotten)


def test_a_child_finds_its_cluster_whatever_its_parent_was_doing() -> None:
    with wire._lock:
        assert in_a_child(lambda: wire._lock.acquire())


def test_a_child_has_its_own_places_for_those_who_wait(settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "MAX_WAITING": 1}
    assert waiting.waiters.enter()
    try:
        with waiting.waiters._lock:
            assert in_a_child(waiting.waiters.enter)
    finally:
        waiting.waiters.leave()


def test_a_child_limits_by_itself_whatever_its_parent_was_doing() -> None:
    window = algorithm_from_json({"algorithm": "fixed_window", "capacity": 1, "period": 60})
    with without_decision.local._lock:
        assert in_a_child(lambda: without_decision.local.charge([("user:1", "burst", window, 1)]) == 0)
