"""Promises of the algorithms (docs/algorithms.md), as checks of any replay."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from fractions import Fraction
from typing import Any

from tests.traces.cases import Line, OpenReplay
from tests.traces.traffic import MICRO

Admitted = list[tuple[Fraction, int]]
"""(moment in s, cost), in order."""


def check_retry_after_is_exact(open_replay: OpenReplay, rule: Any, lines: Iterable[Line]) -> int:
    """Check that each refused request passes after its `retry_after`, but not 2 µs before.

    A request without `retry_after` must never pass. Return the number of refused requests.
    """
    replay = open_replay(rule)
    refusals = 0
    for line in lines:
        answer = replay.step(line)
        if answer["allowed"]:
            continue
        refusals += 1
        again = line | {"op": "peek"}
        if answer["retry_after"] is None:
            for later in (1, 3600, 86400 * 400):
                assert not replay.step(again | {"at": line["at"] + later})["allowed"], line
            continue
        at = line["at"] + Decimal(repr(answer["retry_after"]))
        assert at > line["at"], line
        assert replay.step(again | {"at": at})["allowed"], (line, answer)
        if at - 2 * MICRO >= line["at"]:
            assert not replay.step(again | {"at": at - 2 * MICRO})["allowed"], (line, answer)
    return refusals


def check_peek_tells_what_a_try_would(open_replay: OpenReplay, rule: Any, lines: Iterable[Line]) -> None:
    replay = open_replay(rule)
    for line in lines:
        told = replay.step(line | {"op": "peek"})
        answer = replay.step(line | {"op": "try_acquire"})
        for field in ("allowed", "wait", "retry_after"):
            assert told[field] == answer[field], (line, field)
        if not answer["allowed"]:
            assert told == answer, line


def check_refusals_and_peeks_change_nothing(open_replay: OpenReplay, rule: Any, lines: list[Line]) -> None:
    """Check that admitted lines get the same answers if refused lines, peeks and lines of cost 0 are left out."""
    everything, passed_only = open_replay(rule), open_replay(rule)
    for replay in (everything, passed_only):
        replay.step({"at": lines[0]["at"], "op": "create"})
    for line in lines:
        answer = everything.step(line)
        if answer["allowed"] and line["op"] != "peek" and line["cost"]:
            assert passed_only.step(line) == answer, line


def check_a_jump_keeps_what_is_spent(open_replay: OpenReplay, rule: Any, lines: list[Line], back: int) -> None:
    """Check that a clock that was `back` seconds ahead and was corrected changes no later answer."""
    jumped, steady = open_replay(rule), open_replay(rule)
    newest: Line = {}
    for number, line in enumerate(lines):
        if newest and number >= len(lines) // 2:
            # The first request after the correction is at the newest moment, so that no time is lost.
            for later in (newest, *lines[number:]):
                assert jumped.step(later) == steady.step(later), later
            return
        answer = steady.step(line)
        assert jumped.step(line | {"at": line["at"] + back}) == answer | {"at": line["at"] + back}, line
        newest = line if answer["allowed"] and line["cost"] else {}


def check_all_or_nothing(open_replay: OpenReplay, rules: list[Any], lines: list[Line]) -> None:
    """Check that a list of rules admits if each of its rules admits, and that a refusal charges none of them."""
    together, apart = open_replay(rules), [open_replay(rule) for rule in rules]
    for replay in (together, *apart):
        replay.step({"at": lines[0]["at"], "op": "create"})
    for line in lines:
        ask = {"op": "peek", "timeout": 10**12} if line["op"] == "acquire" else {"op": "peek"}
        told = [replay.step(line | ask) for replay in apart]
        allowed = all(one["allowed"] for one in told)
        if allowed and line["op"] != "peek":
            told = [replay.step(line) for replay in apart]
        retries = [one["retry_after"] for one in told]
        remaining = min(one["remaining"] for one in told)
        if allowed:
            limit = next(one["limit"] for one in told if one["remaining"] == remaining)
        else:
            longest = None if None in retries else max(retries)
            limit = next(one["limit"] for one in told if one["retry_after"] == longest)
        assert together.step(line) == {
            "at": line["at"],
            "allowed": allowed,
            "wait": max(one["wait"] for one in told) if allowed else 0,
            "limit": limit,
            "remaining": remaining,
            "retry_after": None if None in retries else max(retries),
            "reset_after": max(one["reset_after"] for one in told),
        }, line


def admitted(open_replay: OpenReplay, rule: Any, lines: Iterable[Line]) -> tuple[Admitted, Admitted]:
    """Return the requests that passed, by the time of the request and by the time to proceed."""
    replay = open_replay(rule)
    asked, proceeding = [], []
    for line in lines:
        answer = replay.step(line)
        if answer["allowed"] and line["cost"]:
            at = Fraction(line["at"])
            asked.append((at, line["cost"]))
            proceeding.append((at + Fraction(Decimal(repr(answer["wait"]))), line["cost"]))
    return asked, proceeding


def most_in(taken: Admitted, length: Fraction) -> int:
    """Return the largest number of permits in an interval of this length (without its end)."""
    return max((sum(cost for at, cost in taken if start <= at < start + length) for start, _ in taken), default=0)


def check_level_promise(taken: Admitted, rule: Any) -> None:
    """Check that any interval has at most capacity + length * rate/period permits. Waits may be 1 µs too short."""
    pace = Fraction(rule["rate"]) / Fraction(rule["period"])
    for first, (start, _) in enumerate(taken):
        total = 0
        for at, cost in taken[first:]:
            total += cost
            assert total <= rule["capacity"] + (at - start + Fraction(1, 10**6)) * pace


def check_window_promise(taken: Admitted, rule: Any) -> None:
    """Check that the current bucket and the N - 1 buckets before it have at most `capacity` permits together.

    A plain window is one bucket.
    """
    count = rule.get("sub_windows") or 1
    width = Fraction(rule["period"]) / count
    buckets: dict[int, int] = {}
    for at, cost in taken:
        buckets[at // width] = buckets.get(at // width, 0) + cost
    for newest in buckets:
        assert sum(n for bucket, n in buckets.items() if newest - count < bucket <= newest) <= rule["capacity"]


def check_spacing_promise(proceeding: Admitted, rule: Any) -> None:
    """Check that waiting permits proceed at distances of period/rate: k permits take k * period/rate (±1 µs)."""
    interval = Fraction(rule["period"]) / Fraction(rule["rate"])
    for first, (start, _) in enumerate(proceeding):
        total = -proceeding[first][1]
        for at, cost in proceeding[first:]:
            total += cost
            ahead = total - cost + proceeding[first][1]
            if at > start:
                assert at - start >= (ahead - rule["delay_after"]) * interval - Fraction(1, 10**6)


def check_borrowing_promise(proceeding: Admitted, rule: Any) -> None:
    """Check that grants are at most the stored permits plus the permits that the elapsed time gives.

    The last grant is left out, because it may be on credit. Each grant truncates less than a microsecond.
    """
    interval = Fraction(rule["period"]) / Fraction(rule["rate"])
    stored = Fraction(rule["max_burst_seconds"]) / interval
    for first, (start, _) in enumerate(proceeding):
        total, grants = 0, 0
        for at, cost in proceeding[first:]:
            assert (total - stored) * interval <= at - start + Fraction(grants, 10**6)
            total, grants = total + cost, grants + 1
