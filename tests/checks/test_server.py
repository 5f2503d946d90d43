from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core import checks
from django.test import override_settings
from redis.credentials import UsernamePasswordCredentialProvider

from ratelimits.embedded import free_port
from tests.doctor.restrictions import ALL, USER, connected, user
from tests.support.entry_points import away
from tests.support.fresh import Project
from tests.support.selection import few
from tests.support.servers import TestServers

PROVIDER = UsernamePasswordCredentialProvider("app", "secret")


def found(*databases: str) -> dict[str, str]:
    """Return the messages and hints of errors, by their ids."""
    messages = checks.run_checks(tags=["ratelimits"], databases=databases)
    return {str(each.id): f"{each.msg} {each.hint}" for each in messages if isinstance(each, checks.Error)}


@pytest.mark.django_db
def test_a_server_that_does_not_answer_is_an_error(settings: Any) -> None:
    port = free_port()
    away(settings, port)
    (text,) = found("default").values()
    assert "The server does not answer: ConnectionError: Error" in text
    assert f"The server is 127.0.0.1:{port} (the cache alias 'ratelimits')" in text
    assert [*found("default")] == ["ratelimits.E053"]
    assert found() == {}, "no server is asked without --database"


@pytest.mark.django_db
def test_no_node_of_a_cluster_answers(settings: Any) -> None:
    port = free_port()
    away(settings, port)
    factory = "ratelimits.django_redis_cluster.ConnectionFactory"
    place = {**settings.CACHES["ratelimits"], "OPTIONS": {"CONNECTION_FACTORY": factory}}
    settings.CACHES = {**settings.CACHES, "ratelimits": place}
    assert "The server does not answer: " in found("default")["ratelimits.E053"]


@pytest.mark.django_db
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


@pytest.mark.django_db
@pytest.mark.parametrize("command", ["migrate", "test"])
def test_the_first_step_of_a_deployment_needs_no_server(
    settings: Any, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Django runs these checks in `migrate` and `test` too, and an error would stop them."""
    away(settings, free_port())
    monkeypatch.setattr(sys, "argv", ["manage.py", command])
    assert found("default") == {}


@pytest.mark.django_db
@pytest.mark.parametrize("command", ["migrate", "test"])
def test_nothing_that_is_wrong_with_a_server_stops_a_migration(
    redis_client: redis.Redis, redis_url: str, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    with user(redis_client, *ALL), connected(redis_url, USER, "wrong"):
        before = {*found("default")}
        monkeypatch.setattr(sys, "argv", ["manage.py", command])
        assert before - {*found("default")} == {"ratelimits.E050"}


@pytest.mark.django_db
def test_a_wrong_password_is_named(redis_client: redis.Redis, redis_url: str) -> None:
    with user(redis_client, *ALL), connected(redis_url, USER, "wrong"):
        errors = found("default")
    assert "ratelimits.E053" not in errors
    assert f"The server does not accept the user {USER} with this password" in errors["ratelimits.E050"]


def with_options(name: str, scheme: str = "redis", **options: Any) -> list[checks.CheckMessage]:
    """Return the messages about a cache alias. django-redis stores pools by URL, so each has its own."""
    alias = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": f"{scheme}://{name}:6379/4", "OPTIONS": options}
    with override_settings(CACHES={"ratelimits": alias}):
        return checks.run_checks(tags=["ratelimits"], databases=[])


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        (
            "two",
            {"PASSWORD": "x", "CONNECTION_POOL_KWARGS": {"credential_provider": PROVIDER}},
            "'credential_provider'",
        ),
        ("four", {"CONNECTION_POOL_KWARGS": {"protocol": 4}}, "protocol must be either 2 or 3"),
        ("unknown", {"CONNECTION_POOL_KWARGS": {"socket_timeouts": 1}}, "'socket_timeouts'"),
        ("minus", {"CONNECTION_POOL_KWARGS": {"health_check_interval": -1}}, "health_check_interval is -1"),
        ("soon", {"CONNECTION_POOL_KWARGS": {"health_check_interval": "soon"}}, "'soon'"),
    ],
)
def test_options_that_make_no_connection_are_an_error_that_says_why(
    name: str, options: dict[str, Any], why: str
) -> None:
    (error,) = with_options(name, **options)
    assert error.id == "ratelimits.E043"
    assert why in error.msg


def test_sentinel_over_tls_is_written_in_another_way_and_the_hint_says_how() -> None:
    options: dict[str, Any] = {
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "SENTINELS": [("sentinel", 26379)],
    }
    (error,) = with_options("secure", scheme="rediss", **options)
    assert error.id == "ratelimits.E043"
    assert "begin LOCATION with redis:// and write 'ssl': True" in str(error.hint)
    trust = {"ssl": True, "ssl_ca_certs": "/etc/ssl/redis.pem"}
    assert with_options("trusted", CONNECTION_POOL_KWARGS=trust, SENTINEL_KWARGS=trust, **options) == []


def test_an_option_that_async_code_does_not_have_is_named() -> None:
    (warning,) = with_options("ocsp", scheme="rediss", CONNECTION_POOL_KWARGS={"ssl_ocsp_context": None})
    assert (warning.id, "'ssl_ocsp_context'" in warning.msg) == ("ratelimits.W057", True)


def test_other_options_are_right_and_nothing_is_asked() -> None:
    """The servers of these names do not exist."""
    assert with_options("provider", CONNECTION_POOL_KWARGS={"credential_provider": PROVIDER, "protocol": 3}) == []
    assert with_options("cluster", CONNECTION_FACTORY="ratelimits.django_redis_cluster.ConnectionFactory") == []
    sentinel: dict[str, Any] = {
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "SENTINELS": [("sentinel", 26379)],
    }
    assert with_options("watched", **sentinel) == []
