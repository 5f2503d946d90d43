"""Test that the benchmarks run and write what the docs need, in sizes so small that their figures mean nothing."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import redis

from benchmarks import document, exports, simulate
from benchmarks.support import plan, report, revisions
from benchmarks.support import servers as benchmark_servers
from benchmarks.support.timing import Case, interleaved
from ratelimits.billing.reports.exports import DOWNLOADS
from ratelimits.engine import algorithm_from_json
from tests.support import forked
from tests.support.servers import TestServers, server_binary

ROOT = Path(__file__).resolve().parent.parent
#: Command -> the smallest size that runs all of its code, and a line of the table that it prints.
COMMANDS = {
    "end_to_end": ("--rounds 1 --seconds 0.05 --connections 2", "QuotaThrottle, 3 rules + metering + headers"),
    "server": ("--rounds 1 --calls 100 --seconds 0.05 --users 100 --keys 100", "bare script, one rule"),
    "growth": ("--rounds 1 --calls 2 --rules 10 --overrides 50 --keys 100 --only all", "3 rules, 1 key"),
    "ledger": ("--lines 300 --portion 200 --keys 20 --database sqlite", "sqlite"),
    "pairs.draining": ("--rounds 1 --lines 300 --keys 20 --database sqlite", "the drain"),
    "closing": ("--accounts 6 --keys 2 --gaps 3 --database sqlite", "sqlite"),
    "pages": (
        "--lines 300 --keys 20 --rules 3 --overrides 30 --rounds 1 --database sqlite",
        "suggestions while a name is typed",
    ),
    "pages.imports": ("--lines 30 --rows 20 --database sqlite", "import, on sqlite"),
    "verifying": ("--accounts 6 --keys 2 --database sqlite", "verify"),
    "exports": ("--rows 1001 --format cloudevents-ndjson", "cloudevents-ndjson"),
    "simulate": ("--lines 30 --only bucket", "token_bucket"),
    "bounded": ("--entries 40 --rounds 1 --largest-rounds 1", "charge, all but a few have ended"),
    "tasks": ("--tasks 1 20 --rounds 1 --seconds 0.05", "redis.asyncio, a pool of 50"),
    "identities": ("--identities 20", "20 invented identities"),
    "hostile": ("--length 200 8000 --only rate", "whether it is a rate"),
    "breakdown": ("--rounds 1 --calls 2", "quota.check: find the rules and the command, make the Answer"),
    "waiting.outbound": ("--processes 1 --permits 2 --algorithm token_bucket", "token_bucket"),
    "measured.algorithms": (
        "--rounds 1 --calls 20 --core-rounds 1 --seconds 0.05 --users 100 --server valkey redis6",
        "smooth_warming_up",
    ),
    "pairs.packages": ("--rounds 1 --calls 20", "`sliding_log` beside DRF's throttle (list of 10 requests)"),
    "pairs.parts": ("--rounds 1 --calls 2", "count the request as usage"),
    "pairs.throttles": ("--rounds 1 --calls 2", "three of DRF's own throttles"),
    "pairs.accounts": ("--rounds 1 --calls 2", "one server"),
    "pairs.importing": ("--rounds 1", "and ratelimits, its admin and its middleware"),
    "twice": ("--rounds 1 --calls 2", "redis-py's connection and parser"),
}


def _run(name: str, options: str, out: Path) -> tuple[str, dict[str, Any]]:
    done = forked.run(
        [sys.executable, "-m", f"benchmarks.{name}", *options.split(), "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONWARNINGS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done.stdout, json.loads((out / f"{name}.json").read_text())


def _holds(name: str, printed: str, run: dict[str, Any], line: str) -> None:
    """Check that its table has this line, and that its JSON fills every table of the page that needs no other run."""
    assert line in printed
    assert run["benchmark"] == name
    assert run["machine"]["packages"]["Django"]
    page = (ROOT / "docs" / "performance.md").read_text()
    for table, (needed, make) in document.TABLES.items():
        if needed in ((), (name,)):
            assert make({name: run}) in document.filled(page, {name: run}), table


@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_runs_prints_its_table_and_writes_its_json(name: str, tmp_path: Path) -> None:
    options, line = COMMANDS[name]
    printed, run = _run(name, options, tmp_path)
    _holds(name, printed, run, line)


def test_a_line_is_slower_than_at_an_earlier_revision_if_it_was_so_in_every_turn() -> None:
    def measured(one: float, other: float) -> dict[str, float]:
        figures = {"layers": {"one": {"median_us": one}, "other": {"median_us": other, "round_medians_us": [other]}}}
        return dict(revisions.times("", figures))

    turns = [
        {"before": measured(10, 10), "after": measured(11, 12)},
        {"after": measured(12, 9), "before": {**measured(10, 10), "gone since": 1.0}},
    ]
    one, other = revisions.compare(turns)
    assert (one["what"], one["before"], one["after"], one["slower"]) == ("layers one", 10, 11.5, "slower")
    assert (other["what"], other["ratio"], other["slower"]) == ("layers other", 1.05, "")


def test_a_rate_is_compared_as_the_time_of_one_and_a_name_tells_the_figures_apart() -> None:
    tasks = {"64": {"ours": {"per_second": 20_000, "p99_us": 70.0}, "threads": {"per_second": 0}}}
    postgres = {"drain_lines_per_second": 10_000, "rows": 7, "report": {"seconds": 1.5}, "portions": [{"lines": 2}]}
    assert dict(revisions.times("", {"results": {**tasks, "postgres": postgres}})) == {
        "results 64 ours per_second": 50.0,
        "results 64 ours p99_us": 70.0,
        "results postgres drain_lines_per_second": 100.0,
        "results postgres report seconds": 1_500_000.0,
    }


def test_decide_runs_and_says_which_peers_are_not_installed(tmp_path: Path) -> None:
    from benchmarks.measured.peers import PACKAGES

    printed, run = _run("decide", "--rounds 1 --calls 2 --seconds 0.05 --threads 2 --refusals 20", tmp_path)
    _holds("decide", printed, run, "engine, 3 rules on one key + metering")
    absent = [name for name, module in PACKAGES.items() if importlib.util.find_spec(module) is None]
    assert run["missing"] == absent
    assert all(name in printed for name in absent)


def test_what_the_small_runs_leave_out_is_known_to_the_commands() -> None:
    """The small runs use only one format for exports, and one rule for simulations."""
    assert set(exports.FORMATS) <= set(DOWNLOADS)
    assert simulate.chosen("bucket") == ["token_bucket"]
    assert simulate.chosen(None) == list(simulate.RULES)
    for asked in simulate.RULES.values():
        for one in asked if isinstance(asked, list) else [asked]:
            algorithm_from_json(one)


def test_every_table_of_the_page_is_known_and_every_known_table_is_on_it() -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    for table in document.TABLES:
        assert f"<!-- {table} -->\n" in page
        assert f"\n<!-- /{table} -->" in page
    with pytest.raises(ValueError, match="there is no table 'guesses'"):
        document.filled("<!-- guesses -->\n\n<!-- /guesses -->", {"decide": {}})


def test_a_table_without_its_run_stays_as_it_is() -> None:
    page = "<!-- server -->\n\n*Not measured yet.*\n\n<!-- /server -->"
    assert document.filled(page, {"decide": {}}) == page


def test_peers_are_pinned_to_one_version_each() -> None:
    from benchmarks.measured.peers import PACKAGES

    lines = (ROOT / "benchmarks" / "requirements.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert pinned.keys() == PACKAGES.keys()


def test_cases_take_turns_in_every_round() -> None:
    asked: list[str] = []

    def ask(name: str) -> bool:
        asked.append(name)
        return True

    cases = [Case(name, name, "ours", partial(ask, name)) for name in ("a", "b")]
    timed = interleaved(cases, rounds=3, calls=2, warm_up=1)
    assert [asked[start : start + 3].count(asked[start]) for start in range(0, 18, 3)] == [3] * 6
    assert all(len(set(asked[start : start + 6])) == 2 for start in range(0, 18, 6))
    assert [len(one.medians) for one in timed.values()] == [3, 3]
    assert timed["a"].ratio(timed["a"]) == 1


def test_a_call_that_fails_ends_the_run() -> None:
    with pytest.raises(AssertionError, match="broken: the call was answered with a refusal"):
        interleaved([Case("broken", "broken", "ours", lambda: False)], rounds=1, calls=1)


def test_the_page_shows_targets_apart_from_promises_and_those_that_are_missed_first() -> None:
    def claim(text: str, measured: float) -> report.Claim:
        return report.Claim(text, 2, measured)

    run = report.run_json(
        "one", {}, {}, [claim("kept", 1), claim("broken", 3)], [claim("reached", 1), claim("missed", 3)]
    )
    assert "kept" in document.promises({"one": run})
    assert "missed" not in document.promises({"one": run})
    assert [line.split(" | ")[0] for line in document.targets({"one": run}).splitlines()[2:]] == [
        "| missed",
        "| reached",
    ]
    assert document.broken({"one": run}) == ["broken"]


@pytest.mark.parametrize(("measured", "status"), [(1.0, 0), (3.0, 1)])
def test_a_check_of_the_page_fails_if_a_promise_does_not_hold(
    measured: float, status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    about = {"processor": "", "cores": 1, "server": "", "python": "", "packages": {}}
    report.write(report.run_json("one", about, {}, [report.Claim("times", 2, measured)]), tmp_path)
    page = tmp_path / "page.md"
    page.write_text("<!-- promises -->\n<!-- /promises -->")
    assert document.main([str(tmp_path), "--page", str(page), "--check"]) == status
    assert ("does not hold: times" in capsys.readouterr().out) is bool(status)
    assert document.main([str(tmp_path), "--page", str(page)]) == 0


def test_a_server_is_named_or_given_by_its_path(tmp_path: Path) -> None:
    assert benchmark_servers.binary("valkey") is None
    assert benchmark_servers.binary("redis6") == server_binary("redis6")
    (tmp_path / "server").touch()
    assert benchmark_servers.binary(str(tmp_path / "server")) == tmp_path / "server"
    with pytest.raises(argparse.ArgumentTypeError, match="there is no server"):
        benchmark_servers.binary(str(tmp_path / "other"))


def test_only_commands_that_a_client_sends_are_summed(servers: TestServers) -> None:
    """The commands that a script calls are part of the script's time."""
    from benchmarks.pairs import packages

    url = servers.redis.url
    with redis.Redis.from_url(url) as client, redis.Redis.from_url(url) as listener:
        script = "redis.call('SET', 'beside', 1) return redis.call('GET', 'beside')"
        case = Case("one", "one", "peer", lambda: client.eval(script, 0) and client.echo("sent"))
        found = packages.commands_of(listener, case)
    assert found == ({"eval": 20, "echo": 20}, {"set": 20, "get": 20})
    stats = {f"cmdstat_{name}": {"usec": 400, "usec_per_call": 10} for name in ("eval", "echo", "set", "get")}
    assert found.micros(stats, calls=40) == 20


def test_a_promise_holds_at_its_bound() -> None:
    assert report.Claim("at most", 2, 2.0).holds
    assert not report.Claim("at most", 2, 2.1).holds
    assert report.Claim("at least", 3, 3.0, least=True).holds
    assert not report.Claim("at least", 3, 2.9, least=True).holds


def test_every_number_of_reports_is_compared_with_the_first_number_even_if_the_times_are_equal() -> None:
    from benchmarks import verifying

    results = [{"database": "sqlite", "what": "verify", "ms_per_report": ms} for ms in (2.0, 2.0, 3.0)]
    assert list(verifying._ratios(results)) == [(results[1], 1.0), (results[2], 1.5)]


def test_the_plan_follows_from_what_was_measured() -> None:
    runs = {
        "server": {
            "results": {"engine_three": {"per_second": 50_000, "core_us": 20}},
            "memory": {"three": {"growth_per_key": 200}},
        },
        "decide": {"in_place": {"ours": {"adds_us": 70}}},
    }
    needs = plan.needs(1_000_000, runs)
    assert needs.redis_cores == 34
    assert needs.shards == 1024
    assert needs.web_cores == 50
    assert needs.memory_gb == 2
    assert needs.lines_per_second == (10_000_000 / 60, 10_000_000 / 900)


def test_a_chart_escapes_its_labels() -> None:
    chart = report.bar_chart("a < b", "µs", [("x & y", 2.0, "ours"), ("z", 1.0, "peer")])
    assert "a &lt; b" in chart
    assert "x &amp; y" in chart
    assert chart.count("<rect") == 3
