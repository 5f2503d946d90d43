from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from ratelimits.usage.counting.process_totals import TotalKey
from ratelimits.usage.ledger import process_totals
from ratelimits.usage.models import KeyTotal, RuleTotal
from ratelimits.usage.models.totals import DAY, FIVE_DAYS, HOUR, QUARTER, SIX_HOURS
from ratelimits.usage.status.usage_over_time import TOP, Entry, Window, last_day, last_month, usage_over_time
from tests.support.rows import rule

pytestmark = pytest.mark.django_db

NOW = int(time.time())


def total(
    account: str, key: str, rule: int, sums: tuple[int, int, int], at: int = NOW, meter: str = "requests"
) -> None:
    """Write the totals that these requests have in all spans."""
    counts = dict(zip(("admitted_requests", "denied_requests", "shadow_requests"), sums, strict=True))
    for model, span, subject in (
        (RuleTotal, QUARTER, {}),
        (RuleTotal, DAY, {}),
        *((KeyTotal, span, {"account": account, "key": key}) for span in (HOUR, SIX_HOURS, DAY, FIVE_DAYS)),
    ):
        about = {"span": span, "start": at // span * span, "rule": rule, "meter": meter, **subject}
        row = model._default_manager.filter(**about).first() or model(**about, **dict.fromkeys(counts, 0))
        for name, count in counts.items():
            setattr(row, name, getattr(row, name) + count)
        row.save()


def unmetered(account: str, key: str, count: int, at: int = NOW, process: str = "p1") -> None:
    bin_ = at // QUARTER * QUARTER
    process_totals.write(process, {TotalKey("unmetered", account, key, "requests", bin_): (count, count)})


@pytest.mark.parametrize("window", [last_day, last_month])
def test_each_request_is_in_its_step_and_its_lists(window: Callable[[int], Window]) -> None:
    first, second = rule("first"), rule("second")
    total("acme", "api_key:1", first.pk, (10, 2, 0))
    total("acme", "api_key:2", second.pk, (0, 3, 1))
    total("other", "api_key:3", first.pk, (4, 0, 0))
    unmetered("acme", "api_key:1", 7)
    unmetered("acme", "api_key:1", 1, process="p2")
    usage = usage_over_time(window(NOW))
    assert usage.totals == {"admitted": 14, "denied": 5, "shadow": 1, "unmetered": 8}
    used = [step for step in usage.steps if any(step.counts.values())]
    assert [step.counts for step in used] == [usage.totals]
    assert used[0].start == NOW // window(NOW).step * window(NOW).step
    assert usage.tops["admitted"]["account"] == (Entry("acme", 10), Entry("other", 4))
    assert usage.tops["denied"]["account"] == (Entry("acme", 5, rule=second.pk),)
    assert usage.tops["denied"]["key"] == (
        Entry("api_key:2", 3, "acme", second.pk),
        Entry("api_key:1", 2, "acme", first.pk),
    )
    assert usage.tops["shadow"]["rule"] == (Entry(str(second.pk), 1),)
    assert usage.tops["unmetered"]["key"] == (Entry("api_key:1", 8, "acme"),)
    assert usage.tops["unmetered"]["rule"] == ()
    assert usage.rule_names == {first.pk: "first", second.pk: "second"}


def test_a_window_ends_with_the_current_step_and_leaves_out_what_is_older() -> None:
    day, month = last_day(NOW), last_month(NOW)
    for window, seconds in ((day, DAY), (month, 30 * DAY)):
        starts = window.starts()
        assert len(starts) * window.step == seconds
        assert starts[0] <= NOW - seconds + HOUR * 24
        assert starts[-1] + window.step > NOW
    total("acme", "k", 1, (5, 0, 0), at=day.start)
    total("acme", "k", 1, (9, 0, 0), at=day.start - 1)
    total("acme", "k", 1, (90, 0, 0), at=month.start - 1)
    unmetered("acme", "k", 3, at=day.start - 1)
    usage = usage_over_time(day)
    assert usage.steps[0].counts["admitted"] == usage.totals["admitted"] == 5
    assert usage.totals["unmetered"] == 0
    assert usage.tops["admitted"]["key"] == (Entry("k", 5, "acme"),)
    assert usage_over_time(month).totals["admitted"] == 14


@pytest.mark.parametrize(("window_at", "step", "steps"), [(last_day, HOUR, 24), (last_month, DAY, 30)])
def test_a_key_is_listed_with_its_usage_of_the_window_wherever_long_spans_begin(
    window_at: Callable[[int], Window], step: int, steps: int
) -> None:
    """Use it once in each step of the window and before it, and look at 30 moments: long spans begin anywhere."""
    for number in range(-10, 80):
        total("acme", "k", 1, (1, 0, 0), at=NOW - number * step)
    for number in range(30):
        window = window_at(NOW - number * step)
        # Later usage is in the rows too. In production there is none.
        later = 10 + number
        assert usage_over_time(window).tops["admitted"]["key"] == (Entry("k", steps + later, "acme"),)


def test_meters_are_never_added_up() -> None:
    total("acme", "k", 1, (5, 0, 0))
    total("acme", "k", 2, (5, 1, 0), meter="tokens")
    usage = usage_over_time(last_day(NOW))
    assert usage.meters == {"tokens": 6, "requests": 5}
    assert (usage.meter, usage.totals["admitted"]) == ("tokens", 5)
    usage = usage_over_time(last_day(NOW), "requests")
    assert (usage.meter, usage.totals["denied"]) == ("requests", 0)
    assert usage.tops["admitted"]["rule"] == (Entry("1", 5),)
    assert usage_over_time(last_day(NOW), "unknown").meter == "tokens"


def test_without_usage_there_is_nothing() -> None:
    usage = usage_over_time(last_day(NOW))
    assert (usage.meter, usage.meters, set(usage.totals.values())) == ("", {}, {0})


def test_the_number_of_queries_does_not_depend_on_the_usage() -> None:
    def count() -> int:
        with CaptureQueriesContext(connection) as queries:
            usage_over_time(last_day(NOW))
            usage_over_time(last_month(NOW))
        return len(queries)

    total("acme", "k", 1, (5, 1, 1))
    before = count()
    for number in range(TOP + 2):
        row = rule(f"rule{number}")
        total(f"account{number}", f"k{number}", row.pk, (5, 1, 1), at=NOW - number * HOUR)
        unmetered(f"account{number}", f"k{number}", 1)
    assert count() == before == 10
    usage = usage_over_time(last_month(NOW))
    assert {len(entries) for lists in usage.tops.values() for entries in lists.values()} == {TOP, 0}
