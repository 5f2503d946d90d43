"""Test rules as code from malformed files: the error names the place, and nothing is changed."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ratelimits import as_code
from ratelimits.algorithms.limits import fields_of
from ratelimits.as_code.reading import RULE
from ratelimits.models import ConfigVersion, Plan, Rule
from ratelimits.simulate.lines import decode_json, read_rules
from tests.support.rows import NEEDED

pytestmark = pytest.mark.django_db(transaction=True)

BURST = {"name": "burst", "algorithm": "token_bucket", "capacity": 10, "rate": 5, "period": 1}


def load(tmp_path: Path, raw: bytes) -> str:
    """Return the error when these bytes are loaded; they must be refused."""
    (path := tmp_path / "rules.json").write_bytes(raw)
    with pytest.raises(CommandError) as caught:
        call_command("ratelimits_rules", "load", str(path))
    assert (Rule.objects.count(), Plan.objects.count(), ConfigVersion.read("default")[0]) == (0, 0, 0)
    text = str(caught.value)
    assert "Traceback" not in text
    text.encode()
    return text


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b'{"rules": [\n"\xff"]}', "line 2: byte 14 of the file is not UTF-8"),
        (b"\xff\xfe{\x00}\x00", "line 1: byte 1 of the file is not UTF-8: save it as UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"rules": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"rules": [{"capacity": ' + b"9" * 5000 + b"}]}", "a number has too many digits"),
        (b'{"rules": [{"rate": 1e99999999999999999999}]}', "a number has too many digits"),
        (b"", "line 1: not JSON"),
        (b"\0", "line 1: not JSON"),
        (b"NaN", "write an object such as"),
    ],
    ids=["latin-1", "utf-16", "deep", "deep inside", "long", "far", "empty", "nul", "no object"],
)
def test_what_cannot_be_read_is_said_with_its_place(tmp_path: Path, raw: bytes, said: str) -> None:
    assert said in load(tmp_path, raw)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("capacity", True, "capacity must be a whole number from 0 to 1000000000000, not true"),
        ("capacity", 1.5, "capacity must be a whole number from 0 to 1000000000000, not 1.5"),
        ("capacity", "10", 'capacity must be a whole number from 0 to 1000000000000, not "10"'),
        ("capacity", [10], "capacity must be a whole number"),
        ("capacity", 10**30, "capacity must be a whole number"),
        ("rate", float("nan"), 'rate must be a number from 0 to 1000000000000, or a text such as "10/5min", not NaN'),
        (
            "rate",
            float("inf"),
            'rate must be a number from 0 to 1000000000000, or a text such as "10/5min", not Infinity',
        ),
        ("rate", {"per": 1}, "rate must be a number"),
        ("rate", "fast", 'rate must be a number from 0 to 1000000000000, or a text such as "10/5min", not "fast"'),
        ("rate", "10/minuet", "“10/minuet” is not a rate: write a number, a slash and a length of time"),
        ("rate", "10/month", "months and years have no fixed length"),
        ("rate", "10/min", "the rate contains another period: delete the field period"),
        ("rate", "10/\x1b[0m", "rate must be a number"),
        ("rate", "1/s" + " " * 100_000, "rate must be a number"),
        ("scope", 7, "scope must be a text that is not empty, not 7"),
        ("scope", None, "scope must be a text that is not empty, not null"),
        ("plan", "", 'plan must be a text that is not empty, not ""'),
        ("plan", ["pro"], 'plan must be a text that is not empty, not ["pro"]'),
        ("bills", "yes", 'bills must be true or false, not "yes"'),
        ("bills", 1, "bills must be true or false, not 1"),
        ("mode", ["shadow"], "mode must be a text"),
        ("key_kind", 7, "key_kind must be a text"),
        ("meter", "to\0kens", "meter must be a text that is not empty"),
        ("meter", "\ud800", "meter must be a text that is not empty"),
        ("on_failure", 0, "on_failure must be a text, not 0"),
        ("max_wait", True, "max_wait must be seconds from 0"),
        ("prefetch", False, "prefetch must be a whole number"),
        ("initial", ["full"], 'initial must be "full", "empty" or a whole number'),
        ("algorithm", ["token_bucket"], "algorithm must be one of fixed_window"),
        ("algorithm", {}, "algorithm must be one of fixed_window"),
        ("algorithm", None, "algorithm must be one of fixed_window"),
        ("name", 7, "write an object such as"),
        ("name", "", "name must be a text that is not empty"),
        ("col\0our", 1, "has no field"),
    ],
)
def test_a_field_of_another_type_is_said(tmp_path: Path, field: str, value: Any, said: str) -> None:
    good = {**BURST, "name": "good"}
    text = load(tmp_path, json.dumps({"rules": [good, {**BURST, field: value}]}).encode())
    assert "rule 2: " in text
    assert said in text


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({"name": ["Pro"]}, 'plan “pro”: name must be a text that is not empty, not ["Pro"]'),
        ({"name": None}, "plan “pro”: name must be a text"),
        ({"name": ""}, "plan “pro”: name must be a text"),
        ({"name": "a\0"}, "plan “pro”: name must be a text"),
        ({"includes": {"requests": True}}, 'plan “pro”: includes of "requests" must be a whole number'),
        ({"includes": {"requests": 1.5}}, 'plan “pro”: includes of "requests" must be a whole number'),
        ({"includes": {"requests": 10**30}}, 'plan “pro”: includes of "requests" must be a whole number'),
        ({"includes": {"": 5}}, "plan “pro”: a meter must be a text that is not empty"),
        ({"includes": {"\ud800": 5}}, "plan “pro”: a meter must be a text"),
        ({"includes": []}, "plan “pro”: includes must be an object"),
        ({"price": 5}, "plan “pro”: write"),
        ({"currency": 5}, "plan “pro”: currency must be a text, not 5"),
        ({"prices": []}, "plan “pro”: prices must be an object"),
        ({"prices": {"": {}}}, "plan “pro”: a meter must be a text that is not empty"),
        ({"prices": {"requests": "0.10"}}, 'plan “pro”: the price of "requests" must be an object such as'),
        ({"prices": {"requests": {"price": "1"}}}, 'plan “pro”: the price of "requests" must be an object such as'),
        ({"prices": {"requests": {"unit_price": "1e3"}}}, 'unit_price of "requests": “1e3” is not a price: write'),
        ({"prices": {"requests": {"unit_price": "1.000"}}}, "“1.000” can mean 1 or 1000: write one of these two"),
        ({"prices": {"requests": {"minimum": "-1"}}}, 'minimum of "requests": a price cannot be below 0'),
        (
            {"prices": {"requests": {"pricing": "graduated", "tiers": ["1,000: 1", "more: 1"]}}, "currency": "EUR"},
            "“1,000” can mean 1 or 1000",
        ),
        ({"prices": {"requests": {"flat_fee": True}}}, 'flat_fee of "requests" must be a decimal as a text'),
        ({"prices": {"requests": {"tiers": "more: 1"}}}, 'tiers of "requests" must be a list of texts such as'),
    ],
)
def test_a_plan_of_another_type_is_said(tmp_path: Path, plan: Any, said: str) -> None:
    assert said in load(tmp_path, json.dumps({"plans": {"pro": plan}, "rules": [BURST]}).encode())


@pytest.mark.parametrize("slug", ["", "\ud800", "a\0", "a b", "x" * 300])
def test_a_slug_that_no_plan_can_have_is_said(tmp_path: Path, slug: str) -> None:
    assert "plan “" in load(tmp_path, json.dumps({"plans": {slug: {}}}).encode())


def test_a_file_with_a_mark_of_its_byte_order_loads(tmp_path: Path) -> None:
    (path := tmp_path / "rules.json").write_bytes(b"\xef\xbb\xbf" + json.dumps({"rules": [BURST]}).encode())
    call_command("ratelimits_rules", "load", str(path))
    assert Rule.objects.get().capacity == 10


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from([*BURST, "plan", "scope", "key_kind", "meter", "mode", "bills", "on_failure", "max_wait"])
DOCUMENTS = st.fixed_dictionaries(
    {},
    optional={
        "rules": st.lists(
            st.dictionaries(FIELDS, JSON, max_size=3).map(lambda other: {**BURST, **other}) | JSON, max_size=2
        ),
        "plans": st.dictionaries(
            st.text(max_size=5),
            st.fixed_dictionaries({}, optional={"name": JSON, "includes": JSON, "prices": JSON}) | JSON,
            max_size=2,
        ),
    },
)
brief = settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def parsed(raw: bytes) -> Any:
    """Return the document, or the error."""
    try:
        return as_code.parse(raw)
    except as_code.RefusedError as error:
        return error


@brief
@given(document=DOCUMENTS)
def test_any_document_loads_or_is_refused_as_a_whole(document: Any) -> None:
    before = as_code.dump("default")
    found = parsed(json.dumps(document).encode())
    try:
        if isinstance(found, dict):
            as_code.load(found, "default")
    except as_code.RefusedError as error:
        found = error
    now = as_code.dump("default")
    assert now == before if isinstance(found, as_code.RefusedError) else parsed(as_code.to_text(now).encode())


@brief
@given(raw=st.binary(max_size=60))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    found = parsed(raw)
    assert isinstance(found, dict) or found.problems


#: A value of each type of JSON, and texts and numbers that few fields accept.
STRANGE: list[Any] = ["abc", "", "1 d", "\0", "9" * 50, -1, 0, 1.5, 10**30, True, None, [], [1], {}, {"a": 1}]


def compared(path: Path, *rules: dict[str, Any]) -> str:
    """Return the error when a file with these rules is compared with the database; "" if it can be loaded."""
    path.write_text(json.dumps({"rules": rules}))
    try:
        call_command("ratelimits_rules", "diff", str(path), stdout=StringIO(), stderr=StringIO())
    except CommandError as error:
        return str(error).removeprefix("Nothing was changed:\n")
    except SystemExit:
        return ""  # the file and the database differ
    return "the rules are not compared"


@pytest.mark.parametrize("algorithm", NEEDED)
def test_each_field_with_each_type_is_loaded_or_refused_with_a_sentence(tmp_path: Path, algorithm: str) -> None:
    path = tmp_path / "rules.json"
    fields = RULE if algorithm == "token_bucket" else {*fields_of(algorithm), "max_wait"}
    for field in fields:
        rules = [
            {"name": f"burst-{number}", "algorithm": algorithm, **NEEDED[algorithm], field: value}
            for number, value in enumerate(STRANGE)
        ]
        # What cannot be read is refused in one file, since an error says the number of its rule.
        unread = [rule for rule in rules if isinstance(parsed(json.dumps({"rules": [rule]}).encode()), Exception)]
        error = compared(path, *unread) if unread else ""
        numbers = [int(number) for number in re.findall(r"^rule (\d+): ", error, re.MULTILINE)]
        assert numbers == [*range(1, len(unread) + 1)], (field, error)
        assert len(error.splitlines()) == len(unread), (field, error)
        for rule in rules:
            if rule not in unread:
                error = compared(path, rule)
                assert not error or error.startswith(("rule 1: ", "rule “")), (field, rule[field])


@pytest.mark.parametrize("field", ["max_wait", "lease_ttl", "rate", "period", "capacity", "refusal_status"])
def test_a_wrong_value_is_refused_with_the_name_of_its_field(tmp_path: Path, field: str) -> None:
    rule = {"name": "burst", "algorithm": "concurrency" if field == "lease_ttl" else "token_bucket"}
    rule |= NEEDED[rule["algorithm"]]
    for value in ("abc", -1, [1], True):
        assert field in compared(tmp_path / "rules.json", {**rule, field: value})


def test_a_null_is_a_missing_field(tmp_path: Path) -> None:
    rule = {"name": "burst", "algorithm": "calendar_window", **NEEDED["calendar_window"]}
    assert compared(tmp_path / "rules.json", {**rule, "timezone": None, "anchor": None, "lasting": None}) == ""


@pytest.mark.parametrize("algorithm", NEEDED)
def test_so_it_is_in_a_rule_file_of_the_simulator(algorithm: str) -> None:
    for field in [*RULE, "unknown"]:
        for value in STRANGE:
            with suppress(ValueError):
                read_rules(
                    decode_json(json.dumps({"algorithm": algorithm, **NEEDED[algorithm], field: value}).encode())
                )
