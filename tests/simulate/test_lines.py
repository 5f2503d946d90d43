"""Test how rules and lines are read: numbers exactly as written, and a sentence for each mistake."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from ratelimits.engine.call import Op
from ratelimits.simulate import Reader, decode_json, json_lines, read_rules

BUCKET = {"algorithm": "token_bucket", "capacity": 10, "rate": 5, "period": 1}
SLOW = {"algorithm": "smooth_bursty", "rate": Decimal("0.000001"), "period": 1}


def read(line: Any, rule: Any = BUCKET) -> Any:
    return Reader(read_rules(rule)).line(line)


@pytest.mark.parametrize(
    ("text", "now"),
    [
        ("0", 0),
        ("12.5", 12_500_000),
        ("1431857100.000001", 1_431_857_100_000_001),
        ("0.0000004", 0),
        ("0.0000005", 1),
        ("1.0000014999999999999999999999", 1_000_001),
        ("1.0000015", 1_000_002),
        ("0.0000004" + "9" * 200, 0),
        ("1431857100.0000005" + "0" * 200 + "1", 1_431_857_100_000_001),
        ("1e3", 1_000_000_000),
        ("0.1e-5", 1),
    ],
)
def test_a_moment_is_read_as_a_decimal_to_the_nearest_microsecond(text: str, now: int) -> None:
    line = read(decode_json(b'{"at": %s}' % text.encode()))
    assert line.now == now


def test_a_line_needs_no_more_than_its_moment() -> None:
    assert read({"at": 1})[2:] == (Op.TRY, "", 1, 0, "", None)


@pytest.mark.parametrize(("timeout", "wait"), [(None, 0), (-5, 0), (Decimal("0.25"), 250_000), (10**30, 2**52)])
def test_a_timeout_is_never_negative_and_never_endless(timeout: Any, wait: int) -> None:
    assert read({"at": 1, "timeout": timeout}).timeout == wait


def test_an_acquire_waits_as_long_as_it_takes() -> None:
    assert read({"at": 1, "op": "acquire", "timeout": 3}).timeout == -1


def test_what_is_null_was_not_given() -> None:
    nothing = dict.fromkeys(("op", "key", "cost", "timeout", "lease", "rule"))
    assert read({"at": 1, **nothing}) == read({"at": 1})


BAD: list[tuple[Any, str]] = [
    ([], "a line is an object"),
    ({}, "at is missing"),
    ({"at": -1}, "at must be from 0"),
    ({"at": Decimal("-0.0000001")}, "at must be from 0"),
    ({"at": 10**13}, "at must be from 0"),
    ({"at": "1"}, 'at must be a number of seconds, not "1"'),
    ({"at": Decimal("NaN")}, "at must be a number of seconds, not NaN"),
    ({"at": float("nan")}, "at must be a number of seconds, not NaN"),
    ({"at": Decimal("Infinity")}, "at must be from 0 to 4503599627, in seconds, not Infinity"),
    ({"at": Decimal("1e999999")}, "at must be from 0"),
    ({"at": True}, "at must be a number of seconds, not true"),
    ({"at": 1, "op": "take"}, 'unknown op "take": use one of try_acquire'),
    ({"at": 1, "op": ["peek"]}, "unknown op"),
    ({"at": 1, "cost": -1}, "cost must be from 0"),
    ({"at": 1, "cost": 2**41}, "cost must be from 0"),
    ({"at": 1, "cost": Decimal("1.5")}, "cost must be a whole number of permits, not"),
    ({"at": 1, "cost": Decimal("1e400")}, "cost must be from 0 to 1099511627776, not 1E+400"),
    ({"at": 1, "cost": Decimal("-Infinity")}, "cost must be from 0"),
    ({"at": 1, "cost": Decimal("NaN")}, "cost must be a whole number of permits, not NaN"),
    ({"at": 1, "timeout": Decimal("NaN")}, "timeout must be a number of seconds, not NaN"),
    ({"at": 1, "cost": True}, "cost must be a whole number of permits, not true"),
    ({"at": 1, "cost": "1"}, "cost must be a whole number"),
    ({"at": 1, "timeout": "long"}, "timeout must be a number of seconds"),
    ({"at": 1, "key": 7}, "key must be a string, not 7"),
    ({"at": 1, "key": "\ud800"}, "key contains half of a surrogate pair"),
    ({"at": 1, "lease": {}}, "lease must be a string"),
    ({"at": 1, "tiemout": 3}, "unknown field 'tiemout': the fields of a line are at, op"),
    ({"at": 1, "rule": BUCKET}, "only a line with set_rule has a rule, not a line with try_acquire"),
    ({"at": 1, "op": "set_rule"}, "set_rule needs a rule"),
    ({"at": 1, "op": "set_rule", "rule": BUCKET | {"rate": 0}}, "rate must be above 0"),
    ({"at": 1, "op": "set_rule", "rule": [BUCKET, BUCKET]}, "set_rule has 2 rules, but the trace has 1"),
]


@pytest.mark.parametrize(("line", "message"), BAD)
def test_a_bad_line_says_what_is_wrong(line: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        read(line)
    assert message in str(raised.value)


def test_a_cost_that_takes_longer_than_doubles_can_count_is_refused() -> None:
    assert read({"at": 1, "cost": 4503}, SLOW).cost == 4503
    with pytest.raises(ValueError, match="takes more than 142 years at this rate: write a cost of at most 4503"):
        read({"at": 1, "cost": 4504}, SLOW)


def test_a_changed_rule_is_what_later_lines_are_read_against() -> None:
    reader = Reader(read_rules(SLOW))
    reader.line({"at": 1, "op": "set_rule", "rule": SLOW | {"rate": 1}})
    assert reader.line({"at": 1, "cost": 4504}).cost == 4504


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "this is not JSON: "),
        (b"\xff", "this is not UTF-8: byte 1"),
        (b"[" * 100_000, "the line is nested too deeply"),
    ],
)
def test_what_is_no_json_says_where(text: bytes, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        decode_json(text)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"at": NaN}', "at must be a number of seconds, not NaN"),
        (b'{"at": -Infinity}', "at must be from 0"),
        (b'{"at": 1e999999999999999999999}', "at must be from 0"),
        (b'{"at": -1e999999999999999999999}', "at must be from 0"),
        (b'{"at": 1, "cost": %s}' % (b"9" * 5000), "cost must be from 0 to 1099511627776, not 99999"),
    ],
)
def test_a_number_that_no_json_has_is_the_line_s_own_mistake(text: bytes, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        read(decode_json(text))
    assert message in str(raised.value)


def test_lines_decoded_together_are_those_decoded_one_by_one() -> None:
    """Text that is not a line by itself is not a line among others either."""
    lots = [
        [b'{"at": 1}', b"", b' {"at": 2, "rule": [{}]}\r\n', b'{"at": 3}'],
        [b'{"at": [{}', b"{}]}", b'{"at": 1},{"at": 2}'],
        [b'{"at": {"x": 1}', b"{}}"],
        [b'{"key": "}', b'{"}'],
        [b'{"at": 1},{"at": 2}', b'{"at": 3'],
        [b'{"at": 1}', b"\xff", b'{"at": NaN}', b"7"],
    ]
    for lines in lots:
        for (number, found), line in zip(json_lines(lines), filter(None, lines), strict=True):
            assert lines[number - 1] is line
            try:
                expected = repr(decode_json(line))
            except ValueError as error:
                expected = repr(error)
            assert repr(found) == expected


def test_rules_are_one_or_several() -> None:
    assert len(read_rules(BUCKET)) == 1
    assert len(read_rules([BUCKET, SLOW])) == 2
    with pytest.raises(ValueError, match="at least one rule"):
        read_rules([])
    assert read_rules(decode_json(json.dumps(BUCKET).encode())) == read_rules(BUCKET)
