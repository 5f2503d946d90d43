"""Test that the simulator decides rules per billing period: `timezone` and `anchor` are the terms of an account."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from tests.simulate.conftest import Simulate, jsonl
from tests.support.usage.traffic import at

PAGE = Path("docs/algorithms.md")
TENTH = "2026-01-10T00:00"
#: The terms of an account, and the starts of three of its periods.
TERMS: list[tuple[dict[str, Any], tuple[str, str, str]]] = [
    ({}, ("2026-11-01T00:00", "2026-12-01T00:00", "2027-01-01T00:00")),
    ({"timezone": "Asia/Tokyo"}, ("2026-11-01T00:00+09:00", "2026-12-01T00:00+09:00", "2027-01-01T00:00+09:00")),
    ({"anchor": TENTH}, ("2026-11-10T00:00", "2026-12-10T00:00", "2027-01-10T00:00")),
    (
        {"timezone": "Asia/Tokyo", "anchor": TENTH},
        ("2026-11-10T00:00+09:00", "2026-12-10T00:00+09:00", "2027-01-10T00:00+09:00"),
    ),
    # The clocks of New York go forward on 8 March; February has no 31st.
    (
        {"timezone": "America/New_York", "anchor": "2026-01-31T06:15"},
        ("2026-02-28T06:15-05:00", "2026-03-31T06:15-04:00", "2026-04-30T06:15-04:00"),
    ),
]


def rule(capacity: int = 2, **terms: Any) -> dict[str, Any]:
    return {"algorithm": "calendar_window", "capacity": capacity, "calendar_unit": "billing_period", **terms}


def seconds(moment: str) -> int:
    return at(moment) // 1_000_000


def lines_around(start: str, end: str) -> list[dict[str, Any]]:
    """Return requests at the first and last moments of a period, and at the first moment of the next one."""
    first, last = seconds(start), seconds(end)
    return [{"at": first}, {"at": last - 1}, {"at": last - 1}, {"at": last}]


def expected(start: str, end: str, later: str) -> list[tuple[bool, int, float, float]]:
    """Return what the results of `lines_around` say with capacity 2: allowed, remaining, retry_after, reset_after."""
    first, last, next_end = map(seconds, (start, end, later))
    return [(True, 1, 0, last - first), (True, 0, 0, 1), (False, 0, 1, 1), (True, 1, 0, next_end - last)]


def said(results: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(one[name] for name in ("allowed", "remaining", "retry_after", "reset_after")) for one in results]


@pytest.mark.parametrize(("terms", "starts"), TERMS)
def test_windows_are_the_periods_of_an_account_with_these_terms(
    simulate: Simulate, terms: dict[str, Any], starts: tuple[str, str, str]
) -> None:
    results, error, status = simulate(rule(**terms), jsonl(*lines_around(*starts[:2])))
    assert (error, status) == ("", 0)
    assert said(results) == expected(*starts)


def test_each_replay_of_a_batch_has_the_terms_of_its_account(simulate: Simulate) -> None:
    replays = [{"rule": rule(**terms), "trace": lines_around(*starts[:2])} for terms, starts in TERMS]
    results, error, status = simulate(batch=jsonl(*replays))
    assert (error, status) == ("", 0)
    assert [said(one["results"]) for one in results] == [expected(*starts) for _terms, starts in TERMS]


def test_an_account_gets_other_terms_and_keeps_what_is_spent(simulate: Simulate) -> None:
    """The period from 10 November becomes the month of November, and then the month of Tokyo."""
    moment = "2026-11-20T12:00"
    now = seconds(moment)
    lines = [
        {"at": now, "cost": 3},
        {"at": now, "op": "set_rule", "rule": rule(5)},
        {"at": now},
        {"at": now, "op": "set_rule", "rule": rule(5, timezone="Asia/Tokyo")},
        {"at": now},
        {"at": now},
        {"at": seconds("2026-12-01T00:00+09:00"), "cost": 5},
    ]
    results, _error, status = simulate(rule(5, anchor=TENTH), jsonl(*lines))
    ends = [now + result["reset_after"] for result in results[:6]]
    assert ends == [seconds(f"2026-{end}") for end in ("12-10", *["12-01"] * 2, *["12-01T00:00+09:00"] * 3)]
    assert [(result["allowed"], result["remaining"]) for result in results] == [
        (True, 2), (True, 2), (True, 1), (True, 1), (True, 0), (False, 0), (True, 0),
    ]  # fmt: skip
    assert status == 0


@pytest.mark.parametrize(("unit", "remaining"), [("month", 2), ("day", 2), ("billing_period", 2)])
def test_a_window_of_another_unit_becomes_one_per_billing_period(simulate: Simulate, unit: str, remaining: int) -> None:
    now = seconds("2026-11-20T12:00")
    lines = [{"at": now, "cost": 3}, {"at": now, "op": "set_rule", "rule": rule(5, anchor=TENTH)}, {"at": now + 60}]
    results, _error, status = simulate(rule(5) | {"calendar_unit": unit}, jsonl(*lines))
    assert [result["remaining"] for result in results] == [2, remaining, remaining - 1]
    assert (results[1]["reset_after"], status) == (seconds("2026-12-10") - now, 0)


def test_rules_of_several_units_are_decided_together(simulate: Simulate) -> None:
    """The month ends on the first, and the period on the tenth: each refuses in its own window."""
    rules = [rule(3, anchor=TENTH), rule(2) | {"calendar_unit": "month"}]
    moments = [*["2026-11-20T00:00"] * 3, *["2026-12-01T00:00"] * 2, *["2026-12-10T00:00"] * 2]
    results, _error, status = simulate(rules, jsonl(*({"at": seconds(moment)} for moment in moments)))
    assert [(result["allowed"], result["limit"]) for result in results] == [
        (True, 2), (True, 2), (False, 2), (True, 3), (False, 3), (True, 2), (False, 2),
    ]  # fmt: skip
    assert [result["retry_after"] for result in results if not result["allowed"]] == [
        seconds("2026-12-01") - seconds("2026-11-20"),
        seconds("2026-12-10") - seconds("2026-12-01"),
        seconds("2027-01-01") - seconds("2026-12-10"),
    ]
    assert status == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"timezone": "Mars/Olympus"}, "unknown time zone 'Mars/Olympus': use an IANA name such as 'UTC'"),
        ({"timezone": "tokyo"}, "unknown time zone 'tokyo'"),
        ({"timezone": ["UTC"]}, "unknown time zone ['UTC']"),
        ({"anchor": "the tenth"}, "anchor 'the tenth' is not an ISO local date-time"),
        ({"anchor": "2026-02-31T00:00"}, "anchor '2026-02-31T00:00' is not an ISO local date-time"),
        ({"anchor": 10}, "anchor 10 is not an ISO local date-time"),
        ({"anchor": "2026-01-10T00:00+09:00"}, "anchor '2026-01-10T00:00+09:00' has an offset"),
        ({"anchor": "2026-01-10T00:00:00.5"}, "anchor '2026-01-10T00:00:00.5' has a fraction of a second"),
        ({"calendar_unit": "billing period"}, "unknown calendar_unit 'billing period': use one of hour, day"),
        ({"calendar_unit": "period"}, "year, billing_period"),
        ({"calendar_unit": None}, "calendar_window needs calendar_unit"),
        ({"billing_anchor": TENTH}, "unknown field 'billing_anchor': calendar_window takes capacity, calendar_unit"),
        ({"account": "acme"}, "unknown field 'account'"),
    ],
)
def test_wrong_terms_are_a_sentence_in_a_rule_a_batch_and_an_edit(
    simulate: Simulate, wrong: dict[str, Any], message: str
) -> None:
    results, error, status = simulate({**rule(), **wrong}, jsonl({"at": 0}))
    assert (results, status) == ([], 2)
    assert message in error
    assert len(error.splitlines()) == 1
    good = {"rule": rule(), "trace": [{"at": 0}]}
    edited = {"rule": rule(), "trace": [{"at": 0}, {"at": 1, "op": "set_rule", "rule": {**rule(), **wrong}}]}
    results, error, status = simulate(batch=jsonl({"rule": {**rule(), **wrong}, "trace": [{"at": 0}]}, edited, good))
    assert (error, status) == ("Replays with an error: 2. Their results contain the errors.\n", 2)
    assert [(one["error"]["line"], len(one["results"])) for one in results[:2]] == [(0, 0), (2, 1)]
    assert all(message in one["error"]["message"] for one in results[:2])
    assert results[2]["results"][0]["allowed"]


def test_the_example_of_the_page(tmp_path: Path) -> None:
    (example,) = re.findall(r"```\n(\$ cat rule\.json\n[^`]*billing_period.*?)```", PAGE.read_text(), re.DOTALL)
    _before, rule_text, trace, shown = re.split(r"^\$ .*\n", example, flags=re.MULTILINE)
    (tmp_path / "rule").write_text(rule_text)
    (tmp_path / "trace").write_text(trace)
    out = io.StringIO()
    call_command("ratelimits_simulate", rule=str(tmp_path / "rule"), trace=str(tmp_path / "trace"), stdout=out)
    assert out.getvalue() == shown
    assert json.loads(rule_text)["calendar_unit"] == "billing_period"
