"""Test projects without the app in INSTALLED_APPS and without a database: each runs in a process of its own."""

from __future__ import annotations

import json
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import pytest

from ratelimits.embedded import free_port
from tests.decide.running import script, settings_of, site
from tests.decide.site import SITES, STATUSES
from tests.support.servers import TestServers

ROOT = Path(__file__).resolve().parents[2]
#: Packages that a project without the app does not import.
NOT_IMPORTED = ("simple_history", "celery", "kombu", "ratelimits.models")
#: A server that no test reaches.
NOWHERE = "redis://nowhere"
APP_IS_MISSING = "ImproperlyConfigured: Rules, plans and usage need the app: add 'ratelimits' to INSTALLED_APPS"


def floor_of(module: str, floors: dict[str, list[str]]) -> str | None:
    """Return the floor of a module, as pyproject.toml lists them."""
    while module:
        for floor, listed in floors.items():
            if module in listed:
                return floor
        module = module.rpartition(".")[0]
    return None


@pytest.fixture(scope="module", params=SITES)
def printed(request: Any, tmp_path_factory: pytest.TempPathFactory, servers: TestServers) -> dict[str, Any]:
    """Return what a site printed: its answers, and the modules that it has imported."""
    namespace = "".join(filter(str.isalpha, request.param))
    return site(tmp_path_factory.mktemp("site"), request.param, settings_of(servers.redis.url, NAMESPACE=namespace))


def test_the_throttles_decide(printed: dict[str, Any]) -> None:
    answers = printed["answers"]
    # The site itself has compared the statuses, in any order.
    assert {place: [status for status, _fields in given] for place, given in answers.items() if place != "async"} == {
        place: statuses for place, statuses in STATUSES.items() if place != "async"
    }
    (_, first), _second, (_, refused) = answers["together"]
    policies = '"sustained";q=4;w=86400, "burst";q=2;w=3600'
    assert first == {"RateLimit": '"burst";r=1;t=3600', "RateLimit-Policy": policies, "Cache-Control": "private"}
    seconds = int(refused["Retry-After"])
    assert 3590 <= seconds <= 3600
    assert refused == {
        "RateLimit": f'"burst";r=0;t={seconds}',
        "RateLimit-Policy": policies,
        "Retry-After": str(seconds),
        "Cache-Control": "no-store, private",
    }
    assert answers["free"][0][1] == {}
    assert all(fields["RateLimit-Policy"] == policies for _status, fields in answers["async"])


def test_they_import_only_what_decides(printed: dict[str, Any]) -> None:
    modules = printed["modules"]
    assert [one for one in modules if one.startswith(NOT_IMPORTED)] == []
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (contract,) = (one for one in contracts if one["type"] == "floors")
    floors = {floor: contract[floor] for floor in ("decide", "limit", "count", "bill")}
    ours = [one for one in modules if one.startswith("ratelimits.")]
    assert len(ours) > 40
    assert {one: floor for one in ours if (floor := floor_of(one, floors)) != "decide"} == {}


@pytest.mark.parametrize(("policy", "status"), [("allow", 200), ("deny", 503)])
def test_the_failure_policy_decides_while_the_server_is_away(tmp_path: Path, policy: str, status: int) -> None:
    text = """
        from ratelimits.telemetry.prometheus import exposition
        print(json.dumps({"answers": [*get("together", 3), *aget("async", 2)], "metrics": exposition().decode()}))
    """
    away = f"redis://127.0.0.1:{free_port()}"
    printed = json.loads(script(tmp_path, text, settings_of(away, FAILURE_POLICY=policy, TELEMETRY=["prometheus"])))
    fields = {"Cache-Control": "no-store, private"} if policy == "deny" else {}
    assert printed["answers"] == [[status, fields]] * 5
    outcome = "unmetered" if policy == "allow" else "unavailable"
    assert f'ratelimits_decisions_total{{outcome="{outcome}",rule=""}} 5.0\n' in printed["metrics"]
    assert "ratelimits_breaker_open 1.0\n" in printed["metrics"]


def test_decisions_are_counted_for_prometheus(tmp_path: Path, servers: TestServers) -> None:
    text = """
        from ratelimits.telemetry.prometheus import exposition
        get("default", 4)
        print(exposition().decode())
    """
    metrics = script(tmp_path, text, settings_of(servers.redis.url, TELEMETRY=["prometheus"]))
    assert 'ratelimits_decisions_total{outcome="admitted",rule="in code"} 3.0\n' in metrics
    assert 'ratelimits_decisions_total{outcome="refused",rule="in code"} 1.0\n' in metrics
    # What is read from the database is not here.
    assert "ratelimits_gaps" not in metrics


def test_refusals_are_sent_and_answered_as_the_project_says(tmp_path: Path, servers: TestServers) -> None:
    (tmp_path / "shop.py").write_text(
        textwrap.dedent("""
            from django.http import HttpResponse

            def refused(request, answer):
                return HttpResponse(f"come back, {answer.binding}, {answer.access}", status=420)
        """)
    )
    text = """
        import sys
        sys.path.insert(0, "")
        from ratelimits.signals import request_refused
        seen = []
        request_refused.connect(lambda answer, **kwargs: seen.append(answer.retry_after), weak=False)
        responses = [Client().get("/scoped/") for _request in range(2)]
        print([response.status_code for response in responses], responses[1].content.decode(), len(seen))
    """
    printed = script(tmp_path, text, settings_of(servers.redis.url, REFUSAL_RESPONSE="shop.refused"))
    assert printed == "[200, 420] come back, None, None 1\n"


def test_a_project_without_a_server_reads_what_to_do(tmp_path: Path) -> None:
    text = """
        settings.CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
        settings.RATELIMITS = {}
        Client().get("/together/")
    """
    error = script(tmp_path, text, settings_of(NOWHERE), fails=True)
    assert "ImproperlyConfigured: The project has no Redis server, and DEBUG is off. Add an alias with BACKEND" in error


def test_an_alias_of_another_cache_is_an_error(tmp_path: Path) -> None:
    error = script(tmp_path, 'Client().get("/together/")', settings_of(NOWHERE, CACHE_ALIAS="default"), fails=True)
    assert "RATELIMITS['CACHE_ALIAS'] is 'default', which is not a django-redis cache: add an alias" in error


def test_what_needs_rules_or_usage_says_that_the_app_is_missing(tmp_path: Path) -> None:
    text = """
        for module, name in (
            ("throttling", "QuotaThrottle"),
            ("middleware", "QuotaMiddleware"),
            ("decorators", "limited"),
            ("models", "Rule"),
            ("quota.checking", "check"),
            ("outbound", "permits"),
            ("testing", "override_rules"),
            ("usage.api", "urls"),
        ):
            try:
                exec(f"from ratelimits.{module} import {name}")
            except Exception as error:
                print(f"{module} {type(error).__name__}: {error}")
    """
    printed = script(tmp_path, text, settings_of(NOWHERE)).splitlines()
    rooms = ["throttling", "middleware", "decorators", "models", "quota.checking", "outbound", "testing", "usage.api"]
    assert [line.partition(":")[0].split()[0] for line in printed if APP_IS_MISSING in line] == rooms


def test_a_setting_that_does_nothing_is_an_error_when_the_process_starts(tmp_path: Path) -> None:
    error = script(tmp_path, "", settings_of(NOWHERE, PATHS=["/files/"]), fails=True)
    says = "RATELIMITS['PATHS'] does nothing in this project, because 'ratelimits' is not in INSTALLED_APPS: add the"
    assert f"django.core.exceptions.ImproperlyConfigured: {says}" in error


def test_a_setting_that_is_wrong_is_an_error_when_the_process_starts(tmp_path: Path) -> None:
    text = """
        from ratelimits.conf import conf
        from ratelimits.throttling import begin_without_app
        for wrong in ({"FAILURE_POLCY": "deny"}, {"TELEMETRY": ["statsd"]}, []):
            settings.RATELIMITS = wrong
            conf.reload()
            try:
                begin_without_app()
            except Exception as error:
                print(f"{type(error).__name__}: {error}")
    """
    printed = script(tmp_path, text, settings_of(NOWHERE)).splitlines()
    unknown = "ImproperlyConfigured: RATELIMITS has no setting 'FAILURE_POLCY'. Known settings: ADDRESS_HEADER, CACHE_"
    invalid = "ImproperlyConfigured: RATELIMITS['TELEMETRY'][0] is 'statsd'. Write a list of"
    for line, says in zip(printed, (unknown, invalid, "ImproperlyConfigured: RATELIMITS is []."), strict=True):
        assert line.startswith(says)


def test_a_view_that_names_a_scope_without_a_rate_is_an_error(tmp_path: Path, servers: TestServers) -> None:
    text = """
        from tests.decide.views import Scoped
        Scoped.throttle_scope = "a scope of a rule"
        Client().get("/scoped/")
    """
    error = script(tmp_path, text, settings_of(servers.redis.url), fails=True)
    assert "ImproperlyConfigured: No default throttle rate set for 'a scope of a rule' scope" in error
