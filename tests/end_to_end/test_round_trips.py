from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from django.db.backends.utils import CursorWrapper
from django.test import Client

from project.models import ApiKey
from ratelimits.models import Rule


@contextmanager
def commands_of_clients(url: str) -> Iterator[list[str]]:
    """Collect the commands that clients (not scripts) send inside the block, as the server itself sees them.

    Leave out how a new connection introduces itself: a thread that counts refusals opens one when it needs it.
    """
    seen: list[str] = []
    with redis.Redis.from_url(url) as client, redis.Redis.from_url(url) as other:
        other.ping()
        with client.monitor() as monitor:
            yield seen
            other.echo("the end")
            _read_until_the_end(monitor, seen)


def _read_until_the_end(monitor: Any, seen: list[str]) -> None:
    for command in monitor.listen():
        if command["command"] == "ECHO the end":
            return
        if command["client_type"] != "lua" and not command["command"].startswith("CLIENT SETINFO"):
            seen.append(command["command"])


@pytest.mark.django_db(transaction=True)
def test_a_known_key_under_three_rules_costs_one_round_trip_and_no_query(
    redis_url: str, issue_key: Callable[[str], tuple[ApiKey, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("user", "account", "global"):
        Rule.objects.create(name=f"per-{kind}", key_kind=kind, algorithm="token_bucket", capacity=100, rate=1, period=1)
    _, secret = issue_key("acme")
    client = Client(headers={"Authorization": f"Api-Key {secret}"})
    queries: list[str] = []
    execute = CursorWrapper.execute

    def noted(self: CursorWrapper, sql: str, params: Any = None) -> object:
        queries.append(sql)
        return execute(self, sql, params)

    # On every connection of every thread. Nothing is replaced: the query still runs.
    monkeypatch.setattr(CursorWrapper, "execute", noted)
    assert client.get("/api/time/").status_code == 200
    queries.clear()
    with commands_of_clients(redis_url) as commands:
        response = client.get("/api/time/")
    assert response.status_code == 200
    assert response["RateLimit-Policy"].count("q=") == 3
    assert [command.split()[0] for command in commands] == ["EVALSHA"]
    assert [sql for sql in queries if "ratelimits_" in sql] == []
    assert len(queries) == 1, "the project's own look-up of the API key"
