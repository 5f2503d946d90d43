"""Test the server on which traces are replayed."""

from __future__ import annotations

from django.test import override_settings

from ratelimits.simulate import sandbox
from tests.support.servers import TestServers


@override_settings(CACHES={}, RATELIMITS={}, DEBUG=False)
def test_a_trace_runs_on_the_given_server_also_in_a_project_that_has_none(servers: TestServers) -> None:
    with sandbox(servers.redis.url) as wire:
        assert wire.client.info("server")["process_id"] == servers.redis.process.pid
