from __future__ import annotations

from typing import Any

import pytest
from django.core import checks
from django.test import override_settings
from redis.credentials import UsernamePasswordCredentialProvider

PROVIDER = UsernamePasswordCredentialProvider("app", "secret")


def found(name: str, scheme: str = "redis", **options: Any) -> list[checks.CheckMessage]:
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
    (error,) = found(name, **options)
    assert error.id == "ratelimits.E043"
    assert why in error.msg


def test_sentinel_over_tls_is_written_in_another_way_and_the_hint_says_how() -> None:
    options: dict[str, Any] = {
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "SENTINELS": [("sentinel", 26379)],
    }
    (error,) = found("secure", scheme="rediss", **options)
    assert error.id == "ratelimits.E043"
    assert "begin LOCATION with redis:// and write 'ssl': True" in str(error.hint)
    trust = {"ssl": True, "ssl_ca_certs": "/etc/ssl/redis.pem"}
    assert found("trusted", CONNECTION_POOL_KWARGS=trust, SENTINEL_KWARGS=trust, **options) == []


def test_an_option_that_async_code_does_not_have_is_named() -> None:
    (warning,) = found("ocsp", scheme="rediss", CONNECTION_POOL_KWARGS={"ssl_ocsp_context": None})
    assert (warning.id, "'ssl_ocsp_context'" in warning.msg) == ("ratelimits.W057", True)


def test_other_options_are_right_and_nothing_is_asked() -> None:
    """The servers of these names do not exist."""
    assert found("provider", CONNECTION_POOL_KWARGS={"credential_provider": PROVIDER, "protocol": 3}) == []
    assert found("cluster", CONNECTION_FACTORY="ratelimits.django_redis_cluster.ConnectionFactory") == []
    sentinel: dict[str, Any] = {
        "CLIENT_CLASS": "django_redis.client.SentinelClient",
        "CONNECTION_FACTORY": "django_redis.pool.SentinelConnectionFactory",
        "SENTINELS": [("sentinel", 26379)],
    }
    assert found("watched", **sentinel) == []
