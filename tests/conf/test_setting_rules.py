"""Test that every setting has a rule, which `manage.py check` and the first use apply."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings
from hypothesis import given
from hypothesis import settings as sized
from hypothesis import strategies as st

from ratelimits.conf import CALLABLES, DEFAULTS, conf
from ratelimits.conf.setting_rules import RULES, complaint
from ratelimits.engine.keys import Keyspace
from tests.support.selection import few

NUMBERS = [float("nan"), float("inf"), -1, "1", None, True, [], 10**400, 1e300]
#: Values of each setting that break its rule.
WRONG: dict[str, list[Any]] = {
    "ENABLED": [None, "no", 0],
    "EMBEDDED": [1, ["folder"]],
    "CACHE_ALIAS": ["", None, 7, ["default"]],
    "NAMESPACE": ["my shop", "", "a:b", "{a}", "ü", "x" * 41, "a\n", None, 7, "a\0", "\ud800"],
    "SHARDS": [0, -1, 6.5, 64.0, 16_385, 10**30, "64", True, None, float("nan")],
    "DATABASE": ["nope", "", None, 7, ["default"]],
    "USER": ["no.such.module", "nodots", "", 7, "os.sep", "tests.conf.test_setting_rules.users"],
    "API_KEY": ["no.such.module", "nodots", "", 7, "os.sep", "tests.conf.test_setting_rules.users"],
    "ACCOUNT_MODEL": ["", "nope", "no.Such", "auth.Nope", "a.b.c", 7, True, ["auth.User"], object()],
    "ONE_ACCOUNT_PER_KEY": [0, 1, "yes", None],
    "ACCOUNT": ["no.such.module", "nodots", "", "a..b", ".a.b", 7, "os.sep", "x\0.y"],
    "KEY_SEARCH": ["no.such.module", "nodots", "", "a..b", ".a.b", 7, "os.sep", "x\0.y"],
    "TRUSTED_PROXIES": ["10.0.0.0/8", None, ["10.0.0.0/33"], ["0.0.0.0/0"], ["::/0"], [""], [7], [10**40], ["proxy"]],
    "ADDRESS_HEADER": ["", None, 7, "X Real IP", "X_Real_IP", "Forwarded", "é", "x" * 101],
    "NUM_PROXIES": ["1", -1, 1.0, 101, True, float("inf")],
    "TIMEOUT": [0, 0.0, 3601, *NUMBERS],
    "MEMORY_BUDGET": [0, 0.96, 1, *NUMBERS],
    "FAILURE_POLICY": ["maybe", "", None, "Allow", ["allow"]],
    "RELOAD_INTERVAL": [0, *NUMBERS],
    "DENY_CACHE_SECONDS": [-0.1, *NUMBERS],
    "PREFETCH_SECONDS": [-0.1, *NUMBERS],
    "RECEIPT_TTL": [0, *NUMBERS],
    "METERS": [
        *("tokens", {"tokens"}, {"tokens": 1}, [7], [None], [""], ["~tokens"], ["x" * 256], ["a\0"], ["\ud800"]),
        *(["tokens"] * 1001, 7, False),
    ],
    "OUTBOUND_SCOPES": ["mailer-api", None, [""], [7], {"mailer-api": 1}],
    "PATHS": [
        "/files/",
        None,
        *({"/": {"cost_bounds": {"tokens": wrong}}} for wrong in (8, (2, 1), (0, 2**41), (1, 2, 3), (True, 2))),
        *({"/": {"cost_bounds": []}}, {"/": {"cost_bounds": None}}, {"/": {"cost_bounds": {7: (0, 1)}}}),
        *({"/": {"cost": wrong}} for wrong in ("lots", "field:n", {"tokens": "field:n"})),
        {"/": {"cost": {"tokens": "lots"}, "cost_bounds": {"tokens": (1, 2)}}},
        {"/": {"cost": {"tokens": "field:n"}, "cost_bounds": {"requests": (1, 2)}}},
        ["files/"],
        [""],
        [7],
        [b"/files/"],
        {"/files/": 1},
        {"files/": {}},
        {"/a/": {"scopes": "a"}},
        {"/a/": {"scope": "a b"}},
        {"/a/": {"key": "X-Tenant"}},
        {"/a/": {"key": ["arg:pk", "X-Tenant"]}},
        {"/a/": {"key": "field:email|upper"}},
        {"/a/": {"key": "arg:pk=7"}},
        {"/a/": {"cost": "1"}},
        {"/a/": {"api_views": "yes"}},
    ],
    "REFUSAL_RESPONSE": ["no.such.module", "nodots", "", 7, "os.sep"],
    "BILL_ERRORS": ["yes", 1, 0, None],
    "MAX_WAITING": [1.5, 10**9, *NUMBERS],
    "X_RATELIMIT_RESET": ["Epoch", "", None, True, ["epoch"]],
    "SHADOW_HEADERS": ["yes", 1, 0, None],
    "X_RATELIMIT_HEADERS": ["yes", 1, 0, None],
    "UNITS": [
        ["tokens"],
        None,
        {"tokens": 7},
        {7: "MB"},
        {"tokens": ""},
        {"a": "x" * 256},
        {"a": "\0"},
        {"a": "\ud800"},
    ],
    "TELEMETRY": ["prometheus", ["statsd"], None, [{}]],
    "RECORD_SAMPLE": [-0.1, 1.1, *NUMBERS],
    "RECORD_SECONDS": [0, *NUMBERS],
    "RECORD_ROWS": [0, 0.5, 1_000_000_001, *NUMBERS],
    "SEAL_INTERVAL": [0, *NUMBERS],
    "FENCE": ["AOF", "", None, True],
    "FENCE_REPLICAS": [0, 101, "1", None, True],
    "FENCE_WINDOW": [0, 301, "10", None],
    "DRAIN_INTERVAL": [0, *NUMBERS],
    "COMPACT_INTERVAL": [0, *NUMBERS],
    "FINALISE_INTERVAL": [0, *NUMBERS],
    "GRACE_SECONDS": [0.5, *NUMBERS],
    "ADJUSTMENT_APPROVAL": ["yes", 1, 0, None],
    "PRORATION": ["x", "", None, ["none"]],
    "LATE_USAGE": ["x", "", None, ["version"]],
    "PROCESS_TOTALS_INTERVAL": [-0.1, *NUMBERS],
    "SIGNING_KEY": [None, 7, b"key", "\ud800", "a\0"],
    "SIGNING_KEYS_OLD": [None, 7, "key", [None], [b"key"], ["\ud800"], {"1": "key"}],
    "BILLING_CUSTOMER": ["no.such.module", "nodots", "", 7, {"acme": "cus_1"}],
    "PUSH": [
        None,
        "stripe",
        ["stripe"],
        {"stripe": None},
        {"stripe": {"KEY": "k"}},
        {"stripe": {"SINCE": "2026-11"}},
        {"stripe": {"KEY": "", "SINCE": "2026-11"}},
        {"mine": {"KEY": "k", "SINCE": "2026-11"}},
        {"a b": {"FORMAT": "lago", "KEY": "k", "SINCE": "2026-11"}},
        {"stripe": {"KEY": "k", "SINCE": "2026-13"}},
        {"stripe": {"KEY": "k…", "SINCE": "2026-11"}},
        {"stripe": {"KEY": "k\n", "SINCE": "2026-11"}},
        {"stripe": {"KEY": "k", "SINCE": "2026-11", "URL": "stripe.com"}},
        {"stripe": {"KEY": "k", "SINCE": "2026-11", "URL": "ftp://stripe.com"}},
        {"stripe": {"KEY": "k", "SINCE": "2026-11", "URL": "https://a:b@stripe.com"}},
        {"stripe": {"KEY": "k", "SINCE": "2026-11", "CUSTOMER": "no.such.module"}},
        {"stripe": {"KEY": "k", "SINCE": "2026-11", "REMEMBERS": "24"}},
        {"stripe": {"KEY": "k", "SINCE": "2026-11", "SECRET": "x"}},
        {"stripe": {"FORMAT": ["lago"], "KEY": "k", "SINCE": "2026-11"}},
    ],
    "PUSH_INTERVAL": [0, *NUMBERS],
    "PUSH_TIMEOUT": [0, 101, *NUMBERS],
    "ALERT_THRESHOLDS": [80, None, [0], [-1], [80.0], ["80"], [True], [10_001], [float("nan")], {80: 1}],
    "ALERT_INTERVAL": [0, *NUMBERS],
    "ALERT_TIMEOUT": [0, 101, *NUMBERS],
    "ALERT_PUBLIC_ONLY": ["yes", 1, 0, None],
}
#: The most extreme values that each rule allows.
RIGHT: dict[str, list[Any]] = {
    "NAMESPACE": ["a", "A-b_c.9", "x" * 40],
    "SHARDS": [1, 16_384],
    "NUM_PROXIES": [None, 0, 3],
    "TIMEOUT": [0.001, 3600],
    "OUTBOUND_SCOPES": [[], ["mailer-api"], ("mailer-api",)],
    "PATHS": [
        [],
        ["/"],
        ("/api/",),
        {"/api/": {}, "/admin/": {"scope": "a", "cost": {"tokens": 2}, "key": "arg:pk"}},
        {"/": {"key": ["header:X-Tenant", "field:email|lower", str]}},
        {"/": {"cost": {"tokens": "field:n"}, "cost_bounds": {"tokens": (1, 8_000), "requests": [0, 2**40]}}},
        {"/": {"cost": "query:n", "cost_bounds": {"requests": (1, 1)}}},
    ],
    "UNITS": [{"traffic": "MB"}],
    "MAX_WAITING": [0],
    "PROCESS_TOTALS_INTERVAL": [0],
    "RECORD_SAMPLE": [0, 0.5, 1],
    "ALERT_THRESHOLDS": [[], [1, 10_000], (50,)],
    "PUSH": [
        {},
        {"stripe": {"KEY": "sk_1", "SINCE": "2026-11"}, "lago": {"KEY": "k", "SINCE": "2026-11"}},
        {"openmeter": {"SINCE": "2026-01", "URL": "http://openmeter:8888/", "REMEMBERS": None}},
        {"eu": {"FORMAT": "stripe", "KEY": "k", "SINCE": "2026-11", "CUSTOMER": "tests.conf.test_conf.account_of"}},
    ],
    "USER": ["tests.conf.test_conf.account_of"],
    "API_KEY": ["tests.conf.test_conf.account_of"],
    "ACCOUNT": ["tests.conf.test_conf.account_of"],
    "ACCOUNT_MODEL": ["auth.User", "project.ApiKey"],
}


def users(request: object) -> Iterator[str]:
    """Yield users: as a hook, this would be another object at each call."""
    yield "ann"


def test_every_setting_has_a_rule_that_its_default_holds() -> None:
    assert RULES.keys() == DEFAULTS.keys()
    assert WRONG.keys() == DEFAULTS.keys()
    assert {name: complaint(name, value) for name, value in DEFAULTS.items()} == dict.fromkeys(DEFAULTS, "")


def test_no_wrong_value_follows_its_rule() -> None:
    assert [(name, value) for name, values in WRONG.items() for value in values if not complaint(name, value)] == []


@pytest.mark.parametrize(
    "name", few(WRONG, "NAMESPACE", "SHARDS", "TIMEOUT", "METERS", "PATHS", "USER", "PUSH", "UNITS")
)
def test_a_wrong_value_is_an_error_and_is_never_used(name: str) -> None:
    for value in [*WRONG[name], 10**5000, object()]:
        refused(name, value)


def refused(name: str, value: Any) -> None:
    with override_settings(RATELIMITS={**settings.RATELIMITS, name: value}):
        found = [
            error for error in checks.run_checks(tags=["ratelimits"], databases=[]) if error.id == "ratelimits.E002"
        ]
        assert [f"RATELIMITS[{name!r}]" in error.msg and " is " in error.msg for error in found] == [True]
        assert "Write " in str(found[0].hint)
        assert len(found[0].msg) < 300
        with pytest.raises(ImproperlyConfigured, match=rf"(?s)^RATELIMITS\['{name}'\](\[.*\])? is .*Write "):
            getattr(conf, name)


FILES = {f"/files/{number}/": {"scope": f"files-{number}", "cost": 2} for number in range(30)}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PATHS", {**FILES, "/login/": {"scop": "login"}}, "['/login/'] is {'scop': 'login'}"),
        ("PATHS", [*FILES, "login/"], "[30] is 'login/'"),
        ("PATHS", {**FILES, "x" * 500: {}}, f"['{'x' * 56}...] is {{}}"),
        ("METERS", [*(f"meter-{number}" for number in range(99)), "two words"], "[99] is 'two words'"),
        ("TRUSTED_PROXIES", ["10.0.0.0/8", "10.1.2.3/8/9"], "[1] is '10.1.2.3/8/9'"),
        ("UNITS", {"traffic": "MB", "tokens": ""}, "['tokens'] is ''"),
        ("METERS", ["a"] * 1_001, " is ['a', 'a', "),  # each of them is right
        ("METERS", {"a": "b"}, " is {'a': 'b'}"),  # it should be a list
        ("PUSH", {"stripe": {"KEY": "sk_live_1"}}, " is a dict that is not shown, since it can contain a secret"),
        ("SIGNING_KEYS_OLD", ["secret", 7], " is a list that is not shown, since it can contain a secret"),
    ],
)
def test_the_wrong_entry_of_a_long_setting_is_named(name: str, value: Any, said: str) -> None:
    with override_settings(RATELIMITS={**settings.RATELIMITS, name: value}):
        (error,) = [
            error for error in checks.run_checks(tags=["ratelimits"], databases=[]) if error.id == "ratelimits.E002"
        ]
        assert error.msg.startswith(f"RATELIMITS['{name}']{said}")
        with pytest.raises(ImproperlyConfigured, match=f"^{re.escape(error.msg)}"):
            getattr(conf, name)


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in RIGHT.items() for value in values])
def test_a_value_within_the_rule_is_used(name: str, value: Any) -> None:
    with override_settings(RATELIMITS={**settings.RATELIMITS, name: value}):
        assert checks.run_checks(tags=["ratelimits"], databases=[]) == []
        used = getattr(conf, name)
        assert callable(used) if name in CALLABLES else used == value


@pytest.mark.parametrize("given", [None, 7, "NAMESPACE", [("NAMESPACE", "shop")], {"a"}])
def test_settings_that_are_no_dict_are_an_error(given: Any) -> None:
    with override_settings(RATELIMITS=given):
        (error,) = [
            error for error in checks.run_checks(tags=["ratelimits"], databases=[]) if error.id == "ratelimits.E002"
        ]
        assert "Write a dict" in str(error.hint)
        with pytest.raises(ImproperlyConfigured, match="Write a dict"):
            _ = conf.SHARDS


def test_names_that_are_no_text_are_unknown_ones() -> None:
    with override_settings(RATELIMITS={**settings.RATELIMITS, 7: 1, None: 2, "SHARD": 3}):
        found = checks.run_checks(tags=["ratelimits"], databases=[])
    assert [error.id for error in found] == ["ratelimits.E001"] * 3


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(),
    st.lists(st.integers() | st.text()),
    st.dictionaries(st.text(), st.text()),
)


@sized(max_examples=200)
@given(name=st.sampled_from(sorted(RULES)), value=JUNK)
def test_no_value_makes_a_rule_fail(name: str, value: Any) -> None:
    hint = complaint(name, value)
    assert hint == "" or "Write " in hint


@sized(max_examples=200)
@given(namespace=st.text(st.sampled_from("aZ9_.-{}: ü\0"), max_size=42), shards=st.integers(-2, 17_000))
def test_keys_take_what_the_rules_let_through_and_nothing_else(namespace: str, shards: int) -> None:
    if complaint("NAMESPACE", namespace) or complaint("SHARDS", shards):
        with pytest.raises(ValueError, match="must be"):
            Keyspace(namespace, shards)
    else:
        assert Keyspace(namespace, shards).prefix(0).startswith(f"rl:1:{namespace}:")
