"""Test a database that was restored to an older state than the one that Redis knows."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from django.core import checks
from django.core.management import call_command

from ratelimits import rules
from ratelimits.engine.server import publish_version, version_in_force
from ratelimits.identity import Identity
from ratelimits.models import ConfigVersion, Rule
from tests.rules.conftest import Clock
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

WHO = Identity(user="user:1")


@pytest.fixture(autouse=True)
def _restored(clock: Clock, monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "DENY_CACHE_SECONDS": 0}
    rule(capacity=2, rate="0.000001")
    publish_version(9)
    monkeypatch.setattr(rules._loader, "_clock", clock)
    rules.forget()


def passed(check: Callable[..., Any], times: int) -> int:
    return sum(check(WHO).allowed for _time in range(times))


def test_its_rules_are_in_force(check: Callable[..., Any]) -> None:
    assert passed(check, 5) == 2


def test_it_is_looked_at_once_a_second(
    check: Callable[..., Any], queries: list[str], clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    check(WHO)
    del queries[:]
    passed(check, 50)
    assert queries == []
    for _second in range(3):
        clock.seconds += 1
        passed(check, 2)
        rules._loader._thread.submit(int).result()  # after the check that was started
        passed(check, 10)
    assert len([sql for sql in queries if "configversion" in sql]) <= 6
    assert not [sql for sql in queries if 'FROM "ratelimits_rule"' in sql]
    [said] = [record.getMessage() for record in caplog.records if record.name == "ratelimits.rules.loader"]
    assert "Redis has version 9 of the rules, but the database 'default' has only version 1" in said
    assert "ratelimits_reload" in said


def test_the_next_edit_ends_it(check: Callable[..., Any]) -> None:
    assert passed(check, 3) == 2
    Rule.objects.update(capacity=3)
    assert ConfigVersion.read("default")[0] == version_in_force() == 10
    assert passed(check, 3) == 1
    assert rules.current().version == 10
    Rule.objects.update(capacity=10)
    assert passed(check, 20) == 10 - 3


def warnings() -> list[checks.CheckMessage]:
    """Return what the checks of the database say, without the worker that does not run (W032)."""
    found = checks.run_checks(tags=["database"], databases=["default"])
    return [one for one in found if one.id != "ratelimits.W032"]


def test_a_reload_ends_it_and_the_check_says_so() -> None:
    [warning] = warnings()
    assert warning.id == "ratelimits.W010"
    assert "version 9" in warning.msg
    assert "ratelimits_reload" in str(warning.hint)
    assert "give the tests their own Redis database" in str(warning.hint)
    call_command("ratelimits_reload", stdout=io.StringIO())
    assert warnings() == []
    assert ConfigVersion.read("default")[0] == version_in_force() == 10


def test_editors_at_once_do_not_pass_for_a_restored_database(caplog: pytest.LogCaptureFixture) -> None:
    Rule.objects.update(capacity=3)
    caplog.clear()
    for capacity in range(4, 9):
        Rule.objects.update(capacity=capacity)
    assert caplog.records == []
    assert ConfigVersion.read("default")[0] == version_in_force() == 15


def test_an_emptied_database_starts_above_what_redis_has_heard_of(check: Callable[..., Any]) -> None:
    call_command("flush", interactive=False, verbosity=0)
    rule(capacity=1, rate="0.000001")
    assert ConfigVersion.read("default")[0] == version_in_force() == 10
    assert passed(check, 3) == 1
