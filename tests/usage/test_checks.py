from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings as project
from django.core import checks
from django.test import override_settings

from ratelimits.billing.reports.closing.close import home_shard
from ratelimits.usage.models import ShardState
from tests.support.engine.memory import FULL, NEAR, SHORT, use_share
from tests.support.raw import RawRedis
from tests.support.rows import rule
from tests.support.usage.traffic import flow, use

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("fsync_at_once")]


def ids() -> list[str]:
    found = checks.run_checks(tags=["ratelimits"], databases=["default"])
    return sorted(str(each.id) for each in found if str(each.id).startswith("ratelimits.W03"))


def errors() -> list[str]:
    found = checks.run_checks(tags=["ratelimits"], databases=["default"])
    return sorted(str(each.id) for each in found if isinstance(each, checks.Error))


@pytest.fixture
def _set_back(redis_client: RawRedis) -> Iterator[None]:
    yield
    redis_client.config_set("appendonly", "yes")
    redis_client.config_set("maxmemory-policy", "noeviction")
    redis_client.config_set("maxmemory", 0)


@pytest.mark.usefixtures("_set_back")
def test_a_server_that_may_lose_usage_is_warned_of(redis_client: RawRedis) -> None:
    redis_client.config_set("maxmemory-policy", "allkeys-lru")
    redis_client.config_set("appendonly", "no")
    # In a new project without a rule, people learn at once that no usage will be written.
    assert (ids(), errors()) == (["ratelimits.W030", "ratelimits.W031"], [])
    rule("monthly", bills=True)
    assert ids() == ["ratelimits.W030", "ratelimits.W032"]
    assert errors() == ["ratelimits.E055"]
    redis_client.config_set("maxmemory-policy", "volatile-lru")  # keeps usage, which has no time to live
    assert (ids(), errors()) == (["ratelimits.W030", "ratelimits.W031", "ratelimits.W032"], [])
    assert checks.run_checks(tags=["ratelimits"], databases=[]) == [], "no server is asked without --database"


@pytest.mark.usefixtures("_set_back")
@pytest.mark.parametrize(("share", "found"), [(0.5, []), (NEAR, ["W040"]), (SHORT, ["W041"]), (FULL, ["W041"])])
def test_it_says_that_memory_is_short_before_it_is_full(redis_client: RawRedis, share: float, found: list[str]) -> None:
    checks.run_checks(tags=["ratelimits"], databases=["default"])  # the server keeps the scripts of the doctor
    redis_client.setrange("ballast", 2**24, b"x")  # what else the doctor takes is little beside it
    use_share(redis_client, share)
    messages = checks.run_checks(tags=["ratelimits"], databases=["default"])
    names = [str(message.id).removeprefix("ratelimits.") for message in messages]
    # The doctor adds what it finds on a server that is nearly full.
    assert [name for name in names if name in ("W040", "W041")] == found


def worker() -> str:
    """Return what is said of the worker."""
    found = checks.run_checks(tags=["ratelimits"], databases=["default"])
    return next(each.msg for each in found if each.id == "ratelimits.W032")


def test_a_worker_that_never_ran_or_stopped_is_warned_of() -> None:
    rule("monthly", bills=True)
    assert "what is counted will wait in Redis" in worker()
    use(now=None)
    assert worker() == "Usage waits in Redis: none was sealed and drained yet."
    flow()
    assert ids() == []
    ShardState.objects.update(watermark=1_700_000_000_000_000)
    assert "since 2023-11-14 22:13 UTC: what is counted will wait in Redis" in worker()
    use(now=None)
    assert worker() == "Usage waits in Redis: none was sealed and drained since 2023-11-14 22:13 UTC."


def test_a_rule_whose_counts_are_restored_needs_a_worker() -> None:
    rule("monthly", "calendar_window", calendar_unit="month", lasting=True)
    assert ids() == ["ratelimits.W032"]


def test_usage_that_no_rule_bills_needs_a_worker_too(settings: Any) -> None:
    """Each request that has a rule is counted, and waits in Redis."""
    assert ids() == [], "nothing is counted"
    use(now=None)
    assert ids() == ["ratelimits.W032"]
    flow()
    use(now=None)
    assert ids() == []
    with override_settings(RATELIMITS={**settings.RATELIMITS, "SHARDS": 1}):
        assert ids() == ["ratelimits.W034"]
    flow()
    ShardState.objects.update(watermark=1_700_000_000_000_000)
    assert ids() == [], "all usage is in the ledger, and nothing more is counted"
    rule("plain", bills=False)
    assert ids() == [], "no request came, so nothing waits"
    use(now=None)
    assert ids() == ["ratelimits.W032"]


def test_a_server_that_is_away_is_no_matter_of_the_checks_of_usage() -> None:
    rule("monthly", bills=True)
    away = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": "redis://127.0.0.1:1/0"}
    with override_settings(CACHES={**project.CACHES, "ratelimits": away}):
        assert ids() == []


def test_a_changed_number_of_shards_says_whose_usage_it_leaves_behind(settings: Any) -> None:
    rule("monthly", bills=True)
    assert home_shard("acme") >= 1
    use(now=None)
    flow()
    use(now=None)
    assert ids() == []
    settings.RATELIMITS = {**settings.RATELIMITS, "SHARDS": 1}
    (found,) = (each for each in checks.run_checks(databases=["default"]) if each.id == "ratelimits.W034")
    assert (
        "1 accounts have open billing periods that no task closes any more, and 1 shards have usage in Redis"
        in found.msg
    )
