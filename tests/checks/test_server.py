from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core import checks

from ratelimits.embedded import free_port
from tests.doctor.restrictions import ALL, USER, connected, user
from tests.support.entry_points import away
from tests.support.fresh import Project
from tests.support.selection import few
from tests.support.servers import TestServers

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


@pytest.mark.parametrize("is_away", few([True, False], True))
def test_before_the_first_migration_the_server_is_asked_too(
    tmp_path: Path, servers: TestServers, is_away: bool
) -> None:
    project = Project(tmp_path, servers)
    project.create_database("default")
    if is_away:
        project.settings["CACHES"]["ratelimits"]["LOCATION"] = f"redis://127.0.0.1:{free_port()}/0"
    said = project.manage("check", "--database", "default", fails=is_away)
    assert "ratelimits.W055) The app's tables cannot be read" in said
    assert ("ratelimits.E053" in said) == is_away
    assert "no issues" not in said
    project.manage("migrate", "--verbosity", "0")
    assert "ratelimits.W055" not in project.manage("check", "--database", "default", fails=is_away)


@pytest.mark.parametrize("command", ["migrate", "test"])
def test_the_first_step_of_a_deployment_needs_no_server(
    settings: Any, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Django runs these checks in `migrate` and `test` too, and an error would stop them."""
    away(settings, free_port())
    monkeypatch.setattr(sys, "argv", ["manage.py", command])
    assert found("default") == {}


@pytest.mark.parametrize("command", ["migrate", "test"])
def test_nothing_that_is_wrong_with_a_server_stops_a_migration(
    redis_client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    with user(redis_client, *ALL), connected(redis_url, USER, "wrong"):
        before = {*found("default")}
        monkeypatch.setattr(sys, "argv", ["manage.py", command])
        assert before - {*found("default")} == {"ratelimits.E050"}


def test_a_wrong_password_is_named(redis_client: redis.Redis, redis_url: str) -> None:
    with user(redis_client, *ALL), connected(redis_url, USER, "wrong"):
        errors = found("default")
    assert "ratelimits.E053" not in errors
    assert f"The server does not accept the user {USER} with this password" in errors["ratelimits.E050"]
