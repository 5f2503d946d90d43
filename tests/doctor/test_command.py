"""Test what `ratelimits_doctor` prints, its exit status, and that it leaves nothing on the server."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import redis
from django.core.management import CommandError, call_command

from ratelimits.doctor import walks
from ratelimits.doctor.diagnosis import diagnose
from ratelimits.doctor.findings import ALWAYS, Part, needed
from ratelimits.doctor.scratch import TIME_TO_LIVE, Scratch
from tests.doctor.restrictions import ALL, USER, connected, settings_of_server, user
from tests.support.rows import rule
from tests.support.usage.traffic import use

pytestmark = pytest.mark.django_db


def run(*arguments: str) -> tuple[str, int]:
    """Run the command, and return what it prints and its exit status."""
    out = io.StringIO()
    try:
        call_command("ratelimits_doctor", *arguments, stdout=out)
    except CommandError as error:
        return f"{out.getvalue()}{error}", error.returncode
    return out.getvalue(), 0


def test_a_server_on_which_everything_works() -> None:
    text, status = run()
    assert status == 0
    assert text.endswith("Everything that the project needs works.\n")
    assert [line.split()[:2] for line in text.splitlines()[2:11]] == [[part, "yes"] for part in Part]


def test_a_refused_command_that_is_needed(redis_client: redis.Redis, redis_url: str) -> None:
    with user(redis_client, *ALL, "-hset"), connected(redis_url, USER):
        text, status = run()
    assert status == 1
    assert f"    to do: ACL SETUSER {USER} +hset\n" in text
    assert f"All missing rights in one line: ACL SETUSER {USER} +hset\n" in text
    assert "The project needs what does not work, or is at risk: " in text
    assert redis_client.keys() == []


def test_a_part_that_nobody_needs_is_no_error(redis_client: redis.Redis, redis_url: str) -> None:
    with user(redis_client, *ALL, "resetkeys", "~rl:1:test:*"), connected(redis_url, USER):
        text, status = run()
    assert status == 0
    assert f"ACL SETUSER {USER} ~rl:1:simulate-*" in text


def test_the_json_has_the_documented_form(redis_client: redis.Redis, redis_url: str) -> None:
    with user(redis_client, *ALL, "-zadd"), connected(redis_url, USER):
        rule("jobs", "concurrency")
        text, status = run("--json")
        found = json.JSONDecoder().raw_decode(text)[0]
    assert status == 1
    assert [*found] == ["format", "ok", "needed", "stuck", "servers"]
    assert (found["format"], found["ok"]) == (1, False)
    assert Part.LEASES in found["needed"]
    (one,) = found["servers"]
    assert [*one] == ["address", "user", "product", "version", "works", "fails", "findings", "acl"]
    assert one["fails"] == ["limits", "concurrency"]
    assert {*one["works"], *one["fails"]} == {*Part}
    assert one["acl"] == f"ACL SETUSER {USER} +zadd"
    (finding,) = one["findings"]
    assert [*finding] == ["name", "parts", "why", "mend"]
    assert (finding["name"], finding["parts"]) == ("command:ZADD", ["limits", "concurrency"])


def test_a_server_that_is_away() -> None:
    with connected("redis://127.0.0.1:1/0"):
        text, status = run()
    assert status == 1
    assert "The server does not answer: " in text


def test_what_a_project_needs_depends_on_its_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.delitem(sys.modules, "ratelimits.outbound", raising=False)
    assert needed() == {*ALWAYS}
    rule("logs", "sliding_log", mode="off")
    assert needed() == {*ALWAYS}
    rule("logged", "sliding_log")
    rule("jobs", "concurrency")
    assert needed() == {*ALWAYS, Part.LOGS, Part.LEASES}
    rule("monthly", "calendar_window", capacity=1, bills=True, lasting=False)
    assert needed() == {*ALWAYS, Part.LOGS, Part.LEASES, Part.BILLS}
    rule("restored", "calendar_window", capacity=1)
    assert needed() == {*ALWAYS, Part.LOGS, Part.LEASES, Part.BILLS, Part.RESTORES}


#: Who is there (None: no rule, but a batch that waits); what the last lines of the doctor must say; the exit status.
COUNTED: dict[str, tuple[dict[str, Any] | None, str, int]] = {
    "a rule that bills nothing": ({"bills": False}, "Usage is counted, but it will not reach the ledger", 0),
    "a rule that is off": ({"mode": "off"}, "Everything that the project needs works.", 0),
    "a batch without a rule": (None, "Usage is counted, but it will not reach the ledger", 0),
    "a rule that bills": ({"bills": True}, "The project needs what does not work, or is at risk: bills.", 1),
}


def test_usage_that_will_not_reach_the_ledger_is_named(redis_client: redis.Redis) -> None:
    wrong = []
    for title, (fields, said, expected) in COUNTED.items():
        made = rule("monthly", **fields) if fields is not None else None
        if made is None:
            use(now=None)
        with settings_of_server(redis_client, appendonly="no"):
            text, status = run()
            found = json.JSONDecoder().raw_decode(run("--json")[0])[0]
        if said not in text or status != expected or ("Everything" in text) != ("Everything" in said):
            wrong.append(f"{title}: {status}: {text}")
        if found["stuck"] != ("Everything" not in said) or found["ok"] != (status == 0):
            wrong.append(f"{title}: {found['stuck']}, {found['ok']}")
        if made is not None:
            made.delete()
        redis_client.flushall()
    assert wrong == []


def test_ctrl_c_leaves_nothing(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    walk = walks.walk

    def interrupted(scratch: Scratch, part: Part) -> Exception | None:
        error = walk(scratch, part)
        if part is Part.COUNTS:
            assert redis_client.keys()
            raise KeyboardInterrupt
        return error

    monkeypatch.setattr(walks, "walk", interrupted)
    with pytest.raises(KeyboardInterrupt):
        diagnose()
    assert redis_client.keys() == []


def test_the_keys_of_a_killed_doctor_expire(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    """After each step, each key that it has written goes away after ten minutes, also the state of a month."""
    walk = walks.walk
    wrong: dict[Part, list[Any]] = {}

    def killed(scratch: Scratch, part: Part) -> Exception | None:
        error = walk(scratch, part)
        wrong[part] = [key for key in redis_client.scan_iter() if not 0 < redis_client.pttl(key) <= TIME_TO_LIVE]
        return error

    monkeypatch.setattr(walks, "walk", killed)
    monkeypatch.setattr(Scratch, "clean", lambda self: False)
    diagnose()
    assert redis_client.keys()
    assert wrong == {part: [] for part in Part}
