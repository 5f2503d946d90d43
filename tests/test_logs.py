"""Test that what happens at every request is logged, but never without bound."""

from __future__ import annotations

import importlib
import logging
import threading

import pytest

from ratelimits import logs
from ratelimits.engine.transport.connection import NotReached
from ratelimits.identity import Identity
from ratelimits.quota import checking
from ratelimits.testing import override_rules
from tests.support.entry_points import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("ratelimits.logs.time.monotonic", clock)
    return clock


def test_a_message_is_repeated_once_a_minute_with_its_number(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    logger = logs.bounded("ratelimits.example")
    for number in range(1000):
        logger.warning("the key %s is odd", number)
        if number == 500:
            clock.now += logs.INTERVAL / 2
    clock.now += logs.INTERVAL / 2
    logger.warning("the key %s is odd", "z")
    first, second = caplog.records
    assert first.getMessage() == "the key 0 is odd"
    assert second.getMessage() == "the key z is odd (and 999 more times since the last such message)"
    assert [record.left_out for record in caplog.records] == [0, 999]  # type: ignore[attr-defined]
    assert first.filename == "test_logs.py"  # not the module of the logger


def test_other_messages_are_logged_meanwhile(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    logger = logs.bounded("ratelimits.example")
    logger.warning("one")
    logger.error("two")
    logger.debug("nobody reads this")
    assert caplog.messages == ["one", "two"]


def test_threads_log_it_once(caplog: pytest.LogCaptureFixture) -> None:
    logger = logs.bounded("ratelimits.example")
    threads = [threading.Thread(target=logger.error, args=("away",)) for _thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert caplog.messages == ["away"]


@pytest.mark.django_db
def test_a_server_that_is_away_does_not_fill_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def away(*arguments: object) -> None:
        raise NotReached("no server")

    monkeypatch.setattr(checking, "decide_call", away)
    with override_rules([{"name": "r", "rate": "10/h", "key_kind": "ip", "on_failure": "local"}]):
        for number in range(50):
            checking.check(Identity(address=f"ip:192.0.2.{number}"))
    assert len([record for record in caplog.records if "failure policy decides" in record.getMessage()]) == 1


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("addresses", {"addresses.proxies"}),
        ("usage.api.views", {"usage.api.throttle"}),
        ("background", {"background", "background.stop_signals"}),
        ("engine.transport.ages", {"engine.transport.credentials"}),
        ("engine.transport.breaker", {"engine.transport.probing"}),
        ("identity", {"identity.requests"}),
        ("usage.jobs", {"usage.task_runs"}),
        ("billing.push.deliveries", {"billing.push.plan", "billing.push.send"}),
        ("usage.tasks", {"usage.tasks"}),
        ("status.keys", {"status.key_owners", "status.known_keys"}),
    ],
)
def test_joined_modules_keep_the_names_of_their_loggers(module: str, names: set[str]) -> None:
    values = vars(importlib.import_module(f"ratelimits.{module}")).values()
    found = {value.name for value in values if isinstance(value, (logging.Logger, logging.LoggerAdapter))}
    assert found == {f"ratelimits.{name}" for name in names}
