"""Test the summary of a replay, for people."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command

from ratelimits.simulate.summary import duration, spark

QUEUE = {"algorithm": "leaky_bucket_queue", "capacity": 1, "rate": 1, "period": 1}


def summary(tmp_path: Path, rule: Any, lines: list[dict[str, Any]]) -> list[str]:
    (tmp_path / "rule").write_text(json.dumps(rule))
    (tmp_path / "trace").write_text("".join(json.dumps(line) + "\n" for line in lines))
    out = io.StringIO()
    options = {"rule": str(tmp_path / "rule"), "trace": str(tmp_path / "trace"), "summary": True}
    call_command("ratelimits_simulate", **options, stdout=out)
    return out.getvalue().splitlines()


def test_it_tells_how_much_passed_who_was_busiest_and_when(tmp_path: Path) -> None:
    lines = [{"at": 0, "key": "busy", "op": op} for op in ("acquire", "acquire", "acquire", "peek", "create")]
    lines += [{"at": 3, "key": "idle"}, {"at": 3, "cost": 3}, {"at": 3, "key": "busy"}]
    assert summary(tmp_path, QUEUE, lines) == [
        "requests      6",
        "admitted      4 (66.7%), 4 permits",
        "refused       2 (33.3%), 1 of them can never be admitted",
        "longest wait  1 s",
        "keys          3; the busiest:",
        "  busy  requests: 4, admitted: 3",
        "  (no key)  requests: 1, admitted: 0",
        "  idle  requests: 1, admitted: 1",
        "admitted in each 1 s (peak: 2):",
        "  █  █",
    ]


def test_an_empty_trace_has_nothing_to_tell(tmp_path: Path) -> None:
    assert summary(tmp_path, QUEUE, []) == ["requests      0"]


def test_four_days_fit_into_one_line(tmp_path: Path) -> None:
    lines = [{"at": 1431857100 + 3600 * hour, "key": str(hour % 2)} for hour in range(96)]
    told = summary(tmp_path, {"algorithm": "sliding_log", "capacity": 5, "period": 3600}, lines)
    assert told[-2:] == ["admitted in each 2 h (peak: 2):", "  " + 48 * "█"]


@pytest.mark.parametrize(
    ("us", "text"),
    [(0, "0 s"), (250_000, "0.25 s"), (119_000_000, "119 s"), (7_200_000_000, "2 h"), (10**12, "11.6 days")],
)
def test_lengths_of_time_have_a_unit_that_suits_them(us: int, text: str) -> None:
    assert duration(us) == text


def test_bars_are_as_high_as_their_counts() -> None:
    assert spark([0, 1, 4, 8]) == " ▁▄█"
    assert spark([0, 0]) == "  "
    assert spark([]) == ""
