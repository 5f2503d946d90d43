"""Test that the doctor of a project without the floor of usage tries limits alone, and says nothing about usage."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import fields

import pytest
import redis

from ratelimits.checks.server import check_redis_server
from ratelimits.doctor.commands import rights
from ratelimits.doctor.diagnosis import diagnose
from ratelimits.doctor.findings import ALWAYS, Ledger, Part, installed, ledger, more_memory, needed
from ratelimits.doctor.properties import properties, unsuitable
from ratelimits.usage import doctor as usage
from tests.doctor.restrictions import USER, connected, settings_of_server, user
from tests.doctor.test_command import run
from tests.support.rows import rule

pytestmark = pytest.mark.django_db

#: What needs no ledger.
OF_LIMITS = [Part.LIMITS, Part.LOGS, Part.LEASES, Part.WAITS, Part.EDITS, Part.TRIES]
KEYS = ("~rl:1:test*", "~rl:1:simulate-*")


@pytest.fixture
def limits_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take away what the floor of usage has installed. No outbound call is limited."""
    monkeypatch.delitem(sys.modules, "ratelimits.outbound", raising=False)
    nothing = Ledger()
    for field in fields(Ledger):
        setattr(ledger, field.name, getattr(nothing, field.name))
    yield
    usage.install()


@pytest.mark.usefixtures("limits_only")
def test_the_doctor_tries_limits_alone() -> None:
    rule("monthly", "calendar_window", capacity=1, bills=True)
    text, status = run()
    assert (status, text.splitlines()[-1]) == (0, "Everything that the project needs works.")
    assert [line.split()[:2] for line in text.splitlines()[2:-1]] == [[part, "yes"] for part in OF_LIMITS]
    found = json.loads(run("--json")[0])
    assert (found["ok"], found["stuck"], found["needed"]) == (True, False, ["limits", "edits"])
    assert found["servers"][0]["works"] == OF_LIMITS
    assert needed() == {Part.LIMITS, Part.EDITS}


@pytest.mark.usefixtures("limits_only")
def test_fewer_rights_are_enough(redis_client: redis.Redis, redis_url: str) -> None:
    few = [*rights()]
    usage.install()
    assert set(rights()) - set(few) == {
        *("+config|get", "+type", "+dump", "+rename", "+renamenx", "+hexists", "+hgetall", "+hincrby", "+hlen"),
    }
    ledger.walks = {}
    with user(redis_client, *KEYS, *few), connected(redis_url, USER):
        (diagnosis,) = diagnose()
        # Nobody may ask for this, so it is said on each floor.
        assert [one.name for one in diagnosis.findings] in ([], ["replay-unknown"])
    with user(redis_client, *KEYS, *few, "-zadd"), connected(redis_url, USER):
        (diagnosis,) = diagnose()
        (finding,) = (one for one in diagnosis.findings if one.name != "replay-unknown")
    assert finding.parts == {Part.LIMITS, Part.LEASES}


@pytest.mark.usefixtures("limits_only")
def test_what_is_wrong_for_usage_alone_is_not_said(redis_client: redis.Redis) -> None:
    rule("monthly", bills=True)
    with settings_of_server(redis_client, appendonly="no", maxmemory_policy="volatile-lru"):
        (diagnosis,) = diagnose()
        (message,) = check_redis_server(None, ["default"])
    (finding,) = diagnosis.findings
    assert (finding.name, finding.parts) == ("evicts", frozenset({Part.LIMITS, Part.LOGS, Part.LEASES}))
    assert message.id == "ratelimits.W031"
    with settings_of_server(redis_client, maxmemory_policy="allkeys-lru"):
        ((evicts,),) = (one.findings for one in diagnose())
    said = [f"{one.why} {one.mend}" for one in (finding, evicts)]
    said += [one.why for one in unsuitable(properties({"maxmemory_policy": None, "used_memory": 1}))]
    said.append(more_memory())
    assert [sentence for sentence in said if "usage" in sentence or "ledger" in sentence] == []


@pytest.mark.usefixtures("limits_only")
def test_a_server_that_is_away_stops_the_installed_parts() -> None:
    with connected("redis://127.0.0.1:1/0"):
        (diagnosis,) = diagnose()
    (finding,) = diagnosis.findings
    assert finding.parts == {*OF_LIMITS}


def test_with_usage_all_parts_are_installed() -> None:
    assert installed() == tuple(Part)
    assert needed() >= {*ALWAYS}
