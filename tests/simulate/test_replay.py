"""Test the server on which traces are replayed, and what it keeps when a rule changes."""

from __future__ import annotations

from django.test import override_settings

from ratelimits.simulate import sandbox
from tests.support.engine.replaying import opening
from tests.support.servers import TestServers


@override_settings(CACHES={}, RATELIMITS={}, DEBUG=False)
def test_a_trace_runs_on_the_given_server_also_in_a_project_that_has_none(servers: TestServers) -> None:
    with sandbox(servers.redis.url) as wire:
        assert wire.client.info("server")["process_id"] == servers.redis.process.pid


def test_a_rule_that_gets_its_former_algorithm_back_starts_afresh(servers: TestServers) -> None:
    window = {"algorithm": "fixed_window", "capacity": 1, "period": 3600}
    with sandbox(servers.redis.url) as wire, opening(wire) as open_replay:
        replay = open_replay(window)
        asked = [
            replay.step({"at": 1, "op": "try_acquire"}),
            replay.step({"at": 2, "op": "set_rule", "rule": {**window, "algorithm": "sliding_window"}}),
            replay.step({"at": 3, "op": "set_rule", "rule": window}),
            replay.step({"at": 4, "op": "try_acquire"}),
            replay.step({"at": 5, "op": "try_acquire"}),
        ]
    assert [outcome["remaining"] for outcome in asked] == [0, 1, 1, 0, 0]
    assert [outcome["allowed"] for outcome in asked[3:]] == [True, False]
