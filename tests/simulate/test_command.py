"""Test `manage.py ratelimits_simulate` as its users call it."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from django.core.management import CommandError, call_command

from tests.simulate.conftest import Simulate, jsonl
from tests.support import forked
from tests.support.eventually import until
from tests.support.forked import Forked
from tests.support.servers import TestServers

BUCKET = {"algorithm": "token_bucket", "capacity": 10, "rate": 5, "period": 1, "initial": "full"}
TWO = [BUCKET, {"algorithm": "concurrency", "capacity": 1, "lease_ttl": 60}]


@pytest.fixture
def keys(servers: TestServers) -> Callable[[], set[bytes]]:
    def found() -> set[bytes]:
        with redis.Redis.from_url(servers.redis.url) as client:
            return set(client.scan_iter("*simulate*"))

    return found


def test_the_example_of_the_documentation(simulate: Simulate) -> None:
    results, _, status = simulate(BUCKET, jsonl({"at": 12.5, "op": "try_acquire", "key": "k", "cost": 1, "timeout": 0}))
    assert status == 0
    assert results == [
        {
            "at": 12.5,
            "allowed": True,
            "wait": 0.0,
            "limit": 10,
            "remaining": 9,
            "retry_after": 0.0,
            "reset_after": 0.2,
        }
    ]


def test_results_are_written_digit_by_digit(tmp_path: Path) -> None:
    (tmp_path / "rule").write_text(json.dumps(BUCKET | {"rate": 3}))
    (tmp_path / "trace").write_text('{"at": 1e3, "cost": 10}\n{"at": 1000.000001000}\n{"at": 1001, "cost": 11}\n')
    out = io.StringIO()
    call_command("ratelimits_simulate", rule=str(tmp_path / "rule"), trace=str(tmp_path / "trace"), stdout=out)
    rest = '"wait": 0.0, "limit": 10, "remaining": '
    assert out.getvalue().splitlines() == [
        f'{{"at": 1E+3, "allowed": true, {rest}0, "retry_after": 0.0, "reset_after": 3.333334}}',
        f'{{"at": 1000.000001000, "allowed": false, {rest}0, "retry_after": 0.333333, "reset_after": 3.333333}}',
        f'{{"at": 1001, "allowed": false, {rest}3, "retry_after": null, "reset_after": 2.333334}}',
    ]


def test_every_op_is_answered(simulate: Simulate) -> None:
    ops = ("create", "try_acquire", "acquire", "peek", "refund", "release", "reset")
    results, _, status = simulate(TWO, jsonl(*({"at": n, "op": op} for n, op in enumerate(ops))))
    assert status == 0
    assert [result["at"] for result in results] == list(range(7))
    # The lease of the second line still counts for the acquire and the peek, until it is given back.
    assert [result["allowed"] for result in results] == [True, True, False, False, True, True, True]


def test_a_changed_rule_holds_for_every_key(simulate: Simulate) -> None:
    lines = [{"at": 0, "key": key, "cost": 7} for key in "abc"]
    lines += [{"at": 0, "key": "a", "op": "set_rule", "rule": BUCKET | {"capacity": 20}}]
    lines += [{"at": 0, "key": key, "op": "peek"} for key in "abc"]
    results, _, _ = simulate(BUCKET, jsonl(*lines))
    assert [(result["limit"], result["remaining"]) for result in results[3:]] == [(20, 13)] * 4


def test_empty_lines_are_nobodys(simulate: Simulate) -> None:
    results, error, status = simulate(BUCKET, '\n{"at": 1}\n   \n\n{"at": -1}\n')
    assert (len(results), error, status) == (1, "line 5: at must be from 0 to 4503599627, in seconds, not -1\n", 2)


def test_a_bad_line_stops_the_run_after_what_came_before_it(simulate: Simulate, keys: Callable[[], set[bytes]]) -> None:
    results, error, status = simulate(BUCKET, jsonl({"at": 1}, {"at": 2}, "{", {"at": 3}))
    assert len(results) == 2
    assert error.startswith("line 3: this is not JSON")
    assert status == 2
    assert keys() == set()


def test_a_bad_rule_is_named_by_its_file(simulate: Simulate) -> None:
    results, error, status = simulate(BUCKET | {"rate": 0}, jsonl({"at": 1}))
    assert (results, status) == ([], 2)
    assert "rule: rate must be above 0" in error


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        ([BUCKET] * 121, "at most 120 rules are decided together, not 121"),
        ({**BUCKET, "capacity": True}, "capacity must be a number, not True"),
        ({**BUCKET, "capacity": "1_0"}, "capacity must be a number, not '1_0'"),
        ({**BUCKET, "capacity": "٣"}, "capacity must be a number, not '٣'"),
        ({**BUCKET, "capacity": [10]}, "capacity must be a number, not [10]"),
        ({**BUCKET, "rate": float("nan")}, "rate must be a number, not NaN"),
        ({**BUCKET, "initial": ["full"]}, "initial must be full, empty or a whole number of tokens"),
        ({**BUCKET, "algorithm": ["gcra"]}, "unknown algorithm ['gcra']"),
        (
            {"algorithm": "calendar_window", "capacity": 1, "calendar_unit": "day", "timezone": "\ud800"},
            "unknown time zone",
        ),
    ],
)
def test_a_rule_that_makes_no_sense_is_a_sentence_alone_and_in_a_batch(
    simulate: Simulate, rule: Any, said: str
) -> None:
    results, error, status = simulate(rule, jsonl({"at": 0}))
    assert (results, status) == ([], 2)
    assert said in error
    good = {"rule": BUCKET, "trace": [{"at": 0}]}
    [wrong, right], error, status = simulate(batch=jsonl({"rule": rule, "trace": [{"at": 0}]}, good))
    assert (wrong["results"], wrong["error"]["line"], status) == ([], 0, 2)
    assert said in wrong["error"]["message"]
    assert len(right["results"]) == 1


def test_a_batch_has_fresh_state_for_each_replay(simulate: Simulate, keys: Callable[[], set[bytes]]) -> None:
    one = {"rule": BUCKET, "trace": [{"at": 0, "cost": 10}, {"at": 0}]}
    results, error, status = simulate(batch=jsonl(one, {"rule": TWO, "trace": []}, one))
    assert (error, status) == ("", 0)
    assert [len(result["results"]) for result in results] == [2, 0, 2]
    assert results[0] == results[2]
    assert [result["allowed"] for result in results[0]["results"]] == [True, False]
    assert keys() == set()


def test_a_bad_line_ends_its_own_replay_only(simulate: Simulate) -> None:
    good = {"rule": BUCKET, "trace": [{"at": 0}]}
    bad = [
        ({"rule": BUCKET, "trace": [{"at": 0}, {"at": 0, "cost": -1}, {"at": 0}]}, 1, 2, "cost must be from 0"),
        ({"rule": BUCKET | {"rate": 0}, "trace": []}, 0, 0, "rate must be above 0"),
        ({"rule": BUCKET}, 0, 0, "a replay must be an object"),
        ("nonsense", 0, 0, "this is not JSON"),
        ({"rule": BUCKET, "trace": [{"at": 0, "op": "set_rule", "rule": {}}]}, 0, 1, "a rule needs an algorithm"),
    ]
    lines = [line for broken, *_ in bad for line in (broken, good)]
    results, error, status = simulate(batch=jsonl(*lines))
    assert (error, status) == ("Replays with an error: 5. Their results contain the errors.\n", 2)
    for (_, answered, number, message), result, after in zip(bad, results[::2], results[1::2], strict=True):
        assert len(result["results"]) == answered
        assert result["error"]["line"] == number
        assert message in result["error"]["message"]
        assert after["results"][0]["allowed"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give a rule"),
        ({"batch": "-", "rule": "rule"}, "--batch cannot be used"),
        ({"batch": "-", "trace": "-"}, "--batch cannot be used"),
        ({"batch": "-", "summary": True}, "--batch cannot be used"),
        ({"rule": "/nowhere/rule.json", "trace": "/dev/null"}, "No such file"),
        ({"rule": "/dev/null", "trace": "/nowhere/trace.jsonl"}, "No such file"),
    ],
)
def test_what_is_asked_for_wrongly(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CommandError, match=message) as raised:
        call_command("ratelimits_simulate", **options)
    assert raised.value.returncode == 2


def test_nothing_stays_behind_and_nothing_else_is_touched(
    simulate: Simulate, servers: TestServers, keys: Callable[[], set[bytes]]
) -> None:
    rules = [
        BUCKET,
        {"algorithm": "sliding_log", "capacity": 5, "period": 60},
        {"algorithm": "sliding_window", "capacity": 5, "period": 60},
        {"algorithm": "concurrency", "capacity": 5, "lease_ttl": 60},
    ]
    with redis.Redis.from_url(servers.redis.url) as client:
        client.set("somebody's", "own")
        before = set(client.scan_iter())
        other = [rules[3], rules[1], rules[0], rules[2]]
        simulate(rules, jsonl({"at": 1, "key": "a"}, {"at": 2, "op": "set_rule", "rule": other}, {"at": 3, "key": "b"}))
        assert set(client.scan_iter()) == before
        client.delete("somebody's")
    assert keys() == set()


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    """Return an environment without Redis, and with a database that does not exist."""
    mine = {name: value for name, value in os.environ.items() if name not in ("REDIS_URL", "DATABASE_URL")}
    nowhere = {"DATABASE_URL": "postgres://nobody@127.0.0.1:1/nowhere", "DEMO_DATA_DIR": str(tmp_path)}
    return {**mine, **nowhere, "DJANGO_SETTINGS_MODULE": "project.settings", **more}


def command(*arguments: str, environment: dict[str, str], trace: str = "") -> subprocess.CompletedProcess[str]:
    return forked.run(
        [sys.executable, "manage.py", "ratelimits_simulate", *arguments],
        input=trace,
        capture_output=True,
        text=True,
        env=environment,
        timeout=60,
    )


def test_it_needs_no_server_and_no_database(tmp_path: Path) -> None:
    rule = tmp_path / "rule.json"
    rule.write_text(json.dumps(BUCKET))
    done = command("--rule", str(rule), environment=environment(tmp_path), trace=jsonl({"at": 1}, {"at": "x"}))
    assert done.returncode == 2
    assert done.stderr == 'line 2: at must be a number of seconds, not "x"\n'
    assert json.loads(done.stdout)["remaining"] == 9


def test_a_server_that_is_away_is_said_to_be(tmp_path: Path) -> None:
    rule = tmp_path / "rule.json"
    rule.write_text(json.dumps(BUCKET))
    away = environment(tmp_path, REDIS_URL="redis://127.0.0.1:1/0")
    done = command("--rule", str(rule), environment=away, trace=jsonl({"at": 1}))
    assert done.returncode == 1
    assert "the server does not answer" in done.stderr
    assert "Traceback" not in done.stderr


#: The kernel gives the signal to another thread, so no system call of the main thread is interrupted. The same happens
#: if the signal comes just before this call.
_TOLD_IN_ANOTHER_THREAD = (
    "import signal, sys, threading\n"
    "threading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n"
    "from django.core.management import execute_from_command_line\n"
    "execute_from_command_line(['manage.py', *sys.argv[1:]])\n"
)


#: The signal comes while Python ends an object in a cycle, as soon as the command handles it.
_TOLD_IN_A_DESTRUCTOR = (
    "import os, signal\n"
    "class Told:\n"
    "    def __init__(self):\n"
    "        self.cycle = self\n"
    "    def __del__(self):\n"
    "        if type(signal.getsignal(signal.SIGTERM)).__module__.endswith('ratelimits_simulate'):\n"
    "            os.kill(os.getpid(), signal.SIGTERM)\n"
    "        else:\n"
    "            Told()\n"
    "Told()\n"
    "import sys\n"
    "from django.core.management import execute_from_command_line\n"
    "execute_from_command_line(['manage.py', *sys.argv[1:]])\n"
)


@pytest.mark.parametrize(
    "start",
    [["manage.py"], ["-c", _TOLD_IN_ANOTHER_THREAD], ["-c", _TOLD_IN_A_DESTRUCTOR]],
    ids=["interrupted", "not", "in a destructor"],
)
def test_a_run_that_is_told_to_stop_leaves_nothing_behind(
    tmp_path: Path, servers: TestServers, keys: Callable[[], set[bytes]], start: list[str]
) -> None:
    rule = tmp_path / "rule.json"
    rule.write_text(json.dumps(BUCKET))
    running = Forked(
        [sys.executable, *start, "ratelimits_simulate", "--rule", str(rule)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        env=environment(tmp_path, REDIS_URL=servers.redis.url),
    )
    assert running.stdin is not None
    if _TOLD_IN_A_DESTRUCTOR not in start:
        running.stdin.write(jsonl(*({"at": n, "key": str(n)} for n in range(2500))).encode())
        running.stdin.flush()
        until(keys, "the run has written keys")
        running.send_signal(signal.SIGTERM)
    assert running.wait(30) == 128 + signal.SIGTERM
    running.stdin.close()
    assert keys() == set()


def test_whoever_stops_reading_hears_no_complaint(tmp_path: Path, servers: TestServers) -> None:
    (tmp_path / "rule.json").write_text(json.dumps(BUCKET))
    (tmp_path / "trace.jsonl").write_text(jsonl(*({"at": n} for n in range(5000))))
    arguments = f"--rule {tmp_path}/rule.json --trace {tmp_path}/trace.jsonl"
    done = subprocess.run(
        f"{sys.executable} manage.py ratelimits_simulate {arguments} | head -1",
        shell=True,
        capture_output=True,
        text=True,
        env=environment(tmp_path, REDIS_URL=servers.redis.url),
        check=False,
        timeout=60,
    )
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


@pytest.mark.long
def test_a_hundred_thousand_lines_in_ten_seconds(tmp_path: Path) -> None:
    (tmp_path / "rule.json").write_text(json.dumps(BUCKET))
    trace = jsonl(*({"at": n / 100, "key": f"k{n % 1000}"} for n in range(100_000)))
    started = time.monotonic()
    done = command("--rule", str(tmp_path / "rule.json"), environment=environment(tmp_path), trace=trace)
    assert len(done.stdout.splitlines()) == 100_000
    assert time.monotonic() - started < 10
