"""Test which parameters the algorithms accept, and which they refuse with a hint, also if the rate is typed."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from datetime import datetime
from decimal import Decimal
from fractions import Fraction
from typing import Any

import pytest

from ratelimits.algorithms.limits import (
    ALGORITHMS,
    Algorithm,
    CalendarWindow,
    Concurrency,
    FixedWindow,
    Gcra,
    LeakyBucket,
    LeakyBucketQueue,
    SlidingLog,
    SlidingWindow,
    SmoothBursty,
    SmoothWarmingUp,
    TokenBucket,
    algorithm_from_json,
    fields_of,
    with_numbers,
)

#: The required parameters of each algorithm.
LEAST: dict[str, dict[str, Any]] = {
    "fixed_window": {"capacity": 10, "period": 60},
    "calendar_window": {"capacity": 10, "calendar_unit": "month"},
    "sliding_window": {"capacity": 10, "period": 60},
    "sliding_log": {"capacity": 10, "period": 60},
    "token_bucket": {"capacity": 10, "rate": 5, "period": 1},
    "gcra": {"capacity": 10, "rate": 5, "period": 1},
    "leaky_bucket": {"capacity": 10, "rate": 5, "period": 1},
    "leaky_bucket_queue": {"capacity": 10, "rate": 5, "period": 1},
    "smooth_bursty": {"rate": 5, "period": 1},
    "smooth_warming_up": {"rate": 5, "period": 1},
    "concurrency": {"capacity": 10},
}
PACED = ("token_bucket", "gcra", "leaky_bucket", "leaky_bucket_queue", "smooth_bursty", "smooth_warming_up")
COUNTED = tuple(name for name, given in LEAST.items() if "capacity" in given and name != "leaky_bucket_queue")
PERIODIC = tuple(name for name, given in LEAST.items() if "period" in given)


def made(algorithm: str, **changes: Any) -> Algorithm:
    return algorithm_from_json({"algorithm": algorithm, **LEAST[algorithm], **changes})


START = "initial must be full, empty or a whole number of tokens"


def complaint(algorithm: str, **changes: Any) -> str:
    with pytest.raises(ValueError) as caught:
        made(algorithm, **changes)
    assert type(caught.value) is ValueError
    return str(caught.value)


def test_there_is_a_least_rule_of_every_algorithm() -> None:
    assert LEAST.keys() == ALGORITHMS.keys()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_least_rule_is_taken_equals_itself_and_cannot_be_changed(algorithm: str) -> None:
    one = made(algorithm)
    assert (one.id, type(one)) == (algorithm, ALGORITHMS[algorithm])
    assert (one, hash(one)) == (made(algorithm), hash(made(algorithm)))
    with pytest.raises(FrozenInstanceError):
        setattr(one, fields(one)[0].name, 1)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_needed_and_left_out_is_named(algorithm: str) -> None:
    needed = " and ".join(name for name in fields_of(algorithm) if name in LEAST[algorithm])
    with pytest.raises(ValueError, match=f"^{algorithm} needs {needed}$"):
        algorithm_from_json({"algorithm": algorithm})


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_null_is_as_if_left_out(algorithm: str) -> None:
    optional = {name: None for name in fields_of(algorithm) if name not in LEAST[algorithm]}
    assert made(algorithm, **optional) == made(algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_fields_of_other_algorithms_and_of_the_form_are_left_alone(algorithm: str) -> None:
    everything = {name: LEAST[algorithm].get(name, 7) for other in LEAST for name in LEAST[other]}
    form = {"name": "burst", "scope": "*", "key_kind": "user", "meter": "requests", "mode": "off", "max_wait": 1}
    assert made(algorithm, **everything, **form) == made(algorithm)


def test_what_no_algorithm_knows_is_refused_by_name() -> None:
    assert complaint("gcra", burst=5) == "unknown field 'burst': gcra takes capacity, rate, period"


@pytest.mark.parametrize("name", ["bucket", "", 5, ["gcra"], {"a": 1}])
def test_an_unknown_algorithm_is_refused_with_those_that_there_are(name: object) -> None:
    with pytest.raises(ValueError, match=r"^unknown algorithm .*: use one of fixed_window, calendar_window, "):
        algorithm_from_json({"algorithm": name})


@pytest.mark.parametrize("data", [None, [], "gcra", 5])
def test_a_rule_is_an_object(data: object) -> None:
    with pytest.raises(ValueError, match=r"^a rule is an object such as \{"):
        algorithm_from_json(data)


def test_a_rule_names_its_algorithm() -> None:
    with pytest.raises(ValueError, match=r"^a rule needs an algorithm: one of fixed_window, "):
        algorithm_from_json({"capacity": 5})


@pytest.mark.parametrize("algorithm", COUNTED)
@pytest.mark.parametrize(
    ("capacity", "message"),
    [
        (-1, "capacity must be at least 0, not -1"),
        (10**12 + 1, "capacity must be at most 1000000000000, not 1000000000001"),
        (1.5, "capacity must be a whole number, not 1.5"),
        ("many", "capacity must be a number, not 'many'"),
        (True, "capacity must be a number, not True"),
        ([5], "capacity must be a number, not [5]"),
        ("nan", "capacity must be a number, not 'nan'"),
        ("Infinity", "capacity must be a number, not 'Infinity'"),
    ],
)
def test_a_capacity_is_a_whole_number_of_at_least_nothing(algorithm: str, capacity: object, message: str) -> None:
    assert complaint(algorithm, capacity=capacity) == message


@pytest.mark.parametrize("algorithm", [*COUNTED, "leaky_bucket_queue"])
def test_a_capacity_of_nothing_is_a_limit_like_others(algorithm: str) -> None:
    closed = made(algorithm, capacity=0)
    assert (closed.shown_limit, closed.quota[0]) == (0, 0)
    assert complaint(algorithm, capacity=-1) == "capacity must be at least 0, not -1"


def test_what_a_rule_says_beside_its_capacity_does_not_keep_it_from_being_closed() -> None:
    assert made("token_bucket", capacity=0, initial=5) == made("token_bucket", capacity=0, initial=0)
    assert made("leaky_bucket_queue", capacity=0, delay_after=5) == made("leaky_bucket_queue", capacity=0)


@pytest.mark.parametrize("field", ["rate", "period"])
@pytest.mark.parametrize("algorithm", PACED)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "must be above 0, not 0"),
        (-0.5, "must be above 0, not -0.5"),
        ("1e13", "must be at most 1000000000000, not 1E+13"),
        (0.1234567, "has more than six decimal places: write 0.123457"),
        ("1." + "0" * 30 + "1", "has more than six decimal places: write 1"),
        (float("nan"), "must be a number, not nan"),
        ({}, "must be a number, not {}"),
    ],
)
def test_a_pace_is_above_zero_with_six_places_at_most(algorithm: str, field: str, value: object, message: str) -> None:
    assert complaint(algorithm, **{field: value}) == f"{field} {message}"


@pytest.mark.parametrize("algorithm", PERIODIC)
def test_a_period_is_142_years_at_most(algorithm: str) -> None:
    assert complaint(algorithm, period=2**52 // 10**6 + 1) == "period is longer than 142 years: write a shorter one"


@pytest.mark.parametrize("algorithm", PACED)
def test_what_takes_more_than_142_years_to_come_back_is_refused(algorithm: str) -> None:
    assert complaint(algorithm, rate="0.000001", period=10_000) == (
        "rate is so low that capacity takes more than 142 years to come back: raise rate or lower capacity"
    )


@pytest.mark.parametrize("algorithm", PACED)
def test_a_rate_whose_fractions_a_double_cannot_hold_is_refused(algorithm: str) -> None:
    message = "rate is too fine to be counted exactly: write it with fewer digits"
    assert complaint(algorithm, rate="99999999999.999999") == message


@pytest.mark.parametrize("value", ["0.9", Decimal("0.9"), 0.9])
def test_a_decimal_is_read_as_it_is_written(value: object) -> None:
    one = made("token_bucket", rate=value)
    assert isinstance(one, TokenBucket)
    assert one.interval == Fraction(10_000_000, 9)


@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        ("fixed_window", {"window_start": "now"}, "window_start must be one of epoch, first_hit, not 'now'"),
        ("fixed_window", {"window_start": ["epoch"]}, "window_start must be one of epoch, first_hit, not ['epoch']"),
        ("sliding_window", {"sub_windows": 0}, "sub_windows must be from 1 to 1000, not 0"),
        ("sliding_window", {"sub_windows": 1001}, "sub_windows must be from 1 to 1000, not 1001"),
        ("sliding_window", {"weighted": 1}, "weighted must be true or false, not 1"),
        (
            "sliding_window",
            {"period": 1, "sub_windows": 7},
            "period 1 does not divide into 7 sub_windows of whole microseconds",
        ),
        (
            "token_bucket",
            {"initial": 11},
            "initial must be full, empty or a whole number of tokens: initial must be from 0 to 10, not 11",
        ),
        ("token_bucket", {"initial": "1.5"}, f"{START}: “1.5” is not a whole number: write digits only, such as 1000."),
        ("token_bucket", {"initial": []}, f"{START}: initial must be a number, not []"),
        ("leaky_bucket_queue", {"delay_after": 11}, "delay_after must be from 0 to 10, not 11"),
        ("smooth_bursty", {"max_burst_seconds": -1}, "max_burst_seconds must be at least 0, not -1"),
        ("smooth_warming_up", {"warm_up": 0}, "warm_up must be above 0, not 0"),
        ("smooth_warming_up", {"cold_factor": 0.9}, "cold_factor must be at least 1, not 0.9"),
        ("concurrency", {"lease_ttl": 0}, "lease_ttl must be above 0, not 0"),
        ("concurrency", {"lease_ttl": 10**10}, "lease_ttl is longer than 142 years: write a shorter one"),
        (
            "smooth_warming_up",
            {"rate": "123456.789011", "warm_up": "0.123457", "cold_factor": "3.141593"},
            "rate and cold_factor together are too fine: write them with fewer decimal places",
        ),
    ],
)
def test_an_algorithms_own_fields_are_checked(algorithm: str, changes: dict[str, Any], message: str) -> None:
    assert complaint(algorithm, **changes) == message


# With larger numbers, a script that counts in steps would need steps that a double cannot represent, and never end.
@pytest.mark.parametrize(
    ("algorithm", "changes", "message"),
    [
        (
            "smooth_bursty",
            {"rate": 399_809_624, "period": "0.000001", "max_burst_seconds": 422_642},
            "max_burst_seconds is too long at this rate: more than 1000000000000 permits would be saved up",
        ),
        (
            "smooth_warming_up",
            {"rate": 48_492_345, "period": "0.000001", "warm_up": "1680.966629"},
            "warm_up is too long at this rate: more than 1000000000000 permits would be saved up",
        ),
        (
            "smooth_bursty",
            {"rate": 1, "period": 3600, "max_burst_seconds": 10**11},
            "max_burst_seconds is too long: the saved permits would take more than 142 years",
        ),
        (
            "smooth_warming_up",
            {"rate": 1, "period": 3600, "warm_up": 10**11},
            "warm_up is too long: the saved permits would take more than 142 years",
        ),
        (
            "smooth_warming_up",
            {"cold_factor": 10**12},
            "a permit would take more than 142 years when cold: raise rate or lower cold_factor",
        ),
    ],
)
def test_what_idleness_stores_can_be_counted(algorithm: str, changes: dict[str, Any], message: str) -> None:
    assert complaint(algorithm, **changes) == message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"calendar_unit": "fortnight"},
            "unknown calendar_unit 'fortnight': use one of hour, day, week, month, year, billing_period",
        ),
        ({"calendar_unit": []}, "unknown calendar_unit []: use one of hour, day, week, month, year, billing_period"),
        *(
            (
                {"timezone": zone},
                f"unknown time zone {shown}: use an IANA name such as 'UTC' or 'Europe/Paris'",
            )
            for zone, shown in (
                *((zone, repr(zone)) for zone in ("Mars/Olympus", "Europe", "../UTC", "", "\0", 5, ["UTC"])),
                ("Z" * 300, f"'{'Z' * 63}…'"),
            )
        ),
        *(
            (
                {"anchor": anchor},
                f"anchor {anchor!r} is not an ISO local date-time: write it like '2026-01-31T06:00'",
            )
            for anchor in ("the 31st", "2026-02-30", 20260131, ["2026-01-31"])
        ),
        (
            {"anchor": "2026-01-31T06:00+01:00"},
            "anchor '2026-01-31T06:00+01:00' has an offset: write it in the rule's own time zone, without an offset",
        ),
        (
            {"anchor": "2026-01-31T06:00:00.5"},
            "anchor '2026-01-31T06:00:00.5' has a fraction of a second: periods start at whole seconds",
        ),
    ],
)
def test_a_calendar_is_checked(changes: dict[str, Any], message: str) -> None:
    assert complaint("calendar_window", **changes) == message


def test_an_empty_anchor_is_none() -> None:
    assert made("calendar_window", anchor="") == made("calendar_window")


@pytest.mark.parametrize(
    ("algorithm", "shown"),
    [
        (FixedWindow(10, Decimal(60)), 10),
        (CalendarWindow(10, "month"), 10),
        (Gcra(10, Decimal(5), Decimal(1)), 10),
        (SmoothBursty(Decimal(5), Decimal(1)), 5),
        (SmoothBursty(Decimal("0.5"), Decimal(1)), 0.5),
    ],
)
def test_what_a_decision_reports_as_its_limit(algorithm: Algorithm, shown: float) -> None:
    assert (algorithm.shown_limit, type(algorithm.shown_limit)) == (shown, type(shown))


@pytest.mark.parametrize(
    ("algorithm", "quota"),
    [
        (FixedWindow(10, Decimal("0.5")), (10, 500_000)),
        (SlidingWindow(10, Decimal(60)), (10, 60_000_000)),
        (SlidingLog(10, Decimal(60)), (10, 60_000_000)),
        (CalendarWindow(10, "hour"), (10, 3_600_000_000)),
        (CalendarWindow(10, "week"), (10, 604_800_000_000)),
        (CalendarWindow(10, "month"), (10, None)),
        (TokenBucket(10, Decimal(3), Decimal(7)), (10, 23_333_334)),
        (LeakyBucket(10, Decimal(5), Decimal(1)), (10, 2_000_000)),
        (Concurrency(10), (10, None)),
        (SmoothBursty(Decimal(5), Decimal(1)), (5, 1_000_000)),
        (SmoothWarmingUp(Decimal(5), Decimal(60)), (5, 60_000_000)),
    ],
)
def test_the_quota_that_a_client_is_told(algorithm: Algorithm, quota: tuple[int, int | None]) -> None:
    assert algorithm.quota == quota


def test_the_quota_of_a_slow_rate_is_one_permit_in_the_time_that_it_takes() -> None:
    assert SmoothBursty(Decimal("0.001"), Decimal(1)).quota == (1, 1_000_000_000)
    assert SmoothBursty(Decimal("2.5"), Decimal(1)).quota == (3, 1_200_000)


def test_the_quota_of_a_queue_is_what_it_takes_at_once() -> None:
    assert LeakyBucketQueue(1, Decimal(5), Decimal(1)).quota == (2, 400_000)
    assert LeakyBucketQueue(9, Decimal(5), Decimal(1)).quota == (10, 2_000_000)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_script_is_handed_eight_whole_numbers_at_most(algorithm: str) -> None:
    params = made(algorithm).params(1_800_000_000_000_000)
    assert len(params) <= 8
    assert all(type(number) is int and 0 <= number < 2**53 for number in params)


def test_every_algorithm_has_a_code_of_its_own() -> None:
    assert len({kind.code for kind in ALGORITHMS.values()}) == len(ALGORITHMS)


def test_a_rate_is_handed_over_as_an_exact_fraction() -> None:
    q, r, n, *_rest = TokenBucket(10, Decimal("0.9"), Decimal(1)).params(0)
    assert Fraction(q) + Fraction(r, n) == Fraction(10**6) / Fraction("0.9")


@pytest.mark.parametrize(("initial", "spent"), [("full", 0), ("empty", 10), (0, 10), (3, 7), ("3", 7), (10, 0)])
def test_a_bucket_is_born_with_its_initial_tokens(initial: int | str, spent: int) -> None:
    assert TokenBucket(10, Decimal(5), Decimal(1), initial).params(0)[6] == spent


def test_the_fields_are_those_of_the_form_in_the_order_of_the_class() -> None:
    assert fields_of("token_bucket") == ("capacity", "rate", "period", "initial")
    assert {name for algorithm in ALGORITHMS for name in fields_of(algorithm)} == {
        "capacity", "rate", "period", "window_start", "calendar_unit", "timezone", "anchor", "sub_windows",
        "weighted", "initial", "delay_after", "max_burst_seconds", "warm_up", "cold_factor", "lease_ttl",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("terms", "start", "end"),
    [
        ({}, "2026-11-01T00:00+00:00", "2026-12-01T00:00+00:00"),
        ({"timezone": "Asia/Tokyo"}, "2026-11-01T00:00+09:00", "2026-12-01T00:00+09:00"),
        ({"anchor": "2026-01-31T06:00"}, "2026-10-31T06:00+00:00", "2026-11-30T06:00+00:00"),
    ],
)
def test_a_billing_period_outside_of_rules_has_the_terms_that_are_given(
    terms: dict[str, str], start: str, end: str
) -> None:
    """The simulator takes `timezone` and `anchor` as the terms of the account."""
    window = algorithm_from_json(
        {"algorithm": "calendar_window", "capacity": 5, "calendar_unit": "billing_period", **terms}
    )
    moments = [round(datetime.fromisoformat(moment).timestamp()) * 1_000_000 for moment in (start, end)]
    assert window.valid_span(moments[0]) == window.valid_span(moments[1] - 1) == tuple(moments)
    with pytest.raises(ValueError, match="frozen"):
        algorithm_from_json(
            {"algorithm": "calendar_window", "capacity": 5, "calendar_unit": "billing_period", "frozen": [1, 2]}
        )


def test_a_billing_period_starts_at_a_quarter_of_an_hour() -> None:
    rule = {"algorithm": "calendar_window", "capacity": 5, "calendar_unit": "billing_period"}
    with pytest.raises(ValueError, match="not at a quarter of an hour"):
        algorithm_from_json({**rule, "anchor": "2026-01-31T06:07"})


@pytest.mark.parametrize(
    ("values", "numbers"),
    [
        ({"algorithm": "gcra", "rate": "10/5min"}, {"capacity": 10, "rate": Decimal(10), "period": Decimal(300)}),
        (
            {"algorithm": "gcra", "rate": "0.5/s", "capacity": 2},
            {"capacity": 2, "rate": Decimal("0.5"), "period": Decimal(1)},
        ),
        ({"algorithm": "fixed_window", "rate": "5/h"}, {"capacity": 5, "period": Decimal(3600)}),
        ({"algorithm": "smooth_bursty", "rate": "5/s"}, {"rate": Decimal(5), "period": Decimal(1)}),
    ],
)
def test_a_typed_rate_becomes_the_numbers_that_the_algorithm_has(
    values: dict[str, Any], numbers: dict[str, Any]
) -> None:
    assert with_numbers(values) == {"algorithm": values["algorithm"], **numbers}


@pytest.mark.parametrize(
    "values",
    [
        {"algorithm": "gcra", "rate": 5, "period": 1},
        {"algorithm": "concurrency", "rate": "10/s"},
        {"algorithm": "no such", "rate": "10/s"},
        {"rate": "10/s"},
        {"algorithm": "gcra", "rate": "fast"},
        {"algorithm": ["gcra"], "rate": "10/s"},
    ],
)
def test_other_values_stay_for_those_who_check_them(values: dict[str, Any]) -> None:
    assert with_numbers(values) == values


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"algorithm": "gcra", "rate": "10/minuet"}, "is not a rate"),
        ({"algorithm": "gcra", "rate": "10/min", "period": 1}, "another period"),
        ({"algorithm": "gcra", "rate": "10/min", "period": "soon"}, "is not a length of time"),
        ({"algorithm": "gcra", "rate": "0.5/s"}, "not a whole number"),
        ({"algorithm": "fixed_window", "rate": "1e99/s", "capacity": 5}, "another capacity"),
    ],
)
def test_a_rate_that_contradicts_another_field_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        with_numbers(values)
