from __future__ import annotations

import sys
from typing import Any

import pytest
import redis
from django.core import checks

from ratelimits.embedded import free_port
from tests.doctor.restrictions import ALL, USER, connected, user
from tests.support.entry_points import away

pytestmark = pytest.mark.django_db


def found(*databases: str) -> dict[str, str]:
    """Return the messages and hints of errors, by their ids."""
    messages = checks.run_checks(tags=["ratelimits"], databases=databases)
    return {str(each.id): f"{each.msg} {each.hint}" for each in messages if isinstance(each, checks.Error)}


def test_a_server_that_does_not_answer_is_an_error(settings: Any) -> None:
    port = free_port()
    away(settings, port)
    (text,) = found("default").values()
    assert "The server does not answer: ConnectionError: Error" in text
    assert f"The server is 127.0.0.1:{port} (the cache alias 'ratelimits')" in text
    assert [*found("default")] == ["ratelimits.E053"]
    assert found() == {}, "no server is asked without --database"


def test_no_node_of_a_cluster_answers(settings: Any) -> None:
    port = free_port()
    away(settings, port)
    factory = "ratelimits.django_redis_cluster.ConnectionFactory"
    place = {**settings.CACHES["ratelimits"], "OPTIONS": {"CONNECTION_FACTORY": factory}}
    settings.CACHES = {**settings.CACHES, "ratelimits": place}
    assert "The server does not answer: " in found("default")["ratelimits.E053"]


@pytest.mark.parametrize("command", ["migrate", "test"])
def test_the_first_step_of_a_deployment_needs_no_server(
    settings: Any, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Django runs these checks in `migrate` and `test` too, and an error would stop them."""
    away(settings, free_port())
    monkeypatch.setattr(sys, "argv", ["manage.py", command])
    assert found("default") == {}


def test_a_wrong_password_is_named(redis_client: redis.Redis, redis_url: str) -> None:
    with user(redis_client, *ALL), connected(redis_url, USER, "wrong"):
        errors = found("default")
    assert "ratelimits.E053" not in errors
    assert f"The server does not accept the user {USER} with this password" in errors["ratelimits.E050"]
