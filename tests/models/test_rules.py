from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.core.exceptions import ValidationError
from django.db import IntegrityError, transaction

from ratelimits.algorithms.limits import ALGORITHMS, TokenBucket, fields_of
from ratelimits.models import Plan, Rule
from ratelimits.models.fields.rule_fields import PARAMETERS, required_fields
from ratelimits.models.keys import KeyKind
from tests.support.rows import NEEDED, rule, unsaved

pytestmark = pytest.mark.django_db


def errors(row: Any) -> dict[str, str]:
    """Return the errors of validation, by field."""
    with pytest.raises(ValidationError) as caught:
        row.full_clean()
    return {field: " ".join(messages) for field, messages in caught.value.message_dict.items()}


def test_every_algorithm_can_be_chosen_and_nothing_else() -> None:
    assert {value for value, _label in Rule._meta.get_field("algorithm").flatchoices} == set(ALGORITHMS)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_rule_with_what_its_algorithm_needs_is_valid(algorithm: str) -> None:
    row = rule(algorithm=algorithm)
    assert isinstance(Rule.objects.get().to_algorithm(), ALGORITHMS[algorithm])
    assert Rule.objects.get().to_algorithm() == row.to_algorithm()


@pytest.mark.parametrize(
    ("algorithm", "field"), [(algorithm, field) for algorithm, fields in NEEDED.items() for field in fields]
)
def test_what_an_algorithm_cannot_do_without_is_asked_for(algorithm: str, field: str) -> None:
    without: dict[str, Any] = {field: "" if field == "calendar_unit" else None}
    said = errors(unsaved(algorithm=algorithm, **without))
    assert list(said) == [field]


def test_decimals_are_read_as_they_were_written() -> None:
    rule(rate=Decimal("0.9"), period=Decimal("1.000001"))
    assert Rule.objects.get().to_algorithm() == TokenBucket(10, Decimal("0.9"), Decimal("1.000001"))


def test_a_rate_of_zero_is_refused() -> None:
    assert errors(unsaved(rate=0))["rate"] == (
        "rate must be above 0, not 0. Write how many permits are added again per period, such as 5."
    )


def test_a_capacity_below_zero_is_refused() -> None:
    assert "at least 0" in errors(unsaved(capacity=-1))["capacity"]
    assert "such as 10" in errors(unsaved(capacity=-1))["capacity"]


@pytest.mark.parametrize("algorithm", [name for name, needed in NEEDED.items() if "capacity" in needed])
def test_of_a_capacity_of_zero_nothing_passes_and_the_sentence_says_so(algorithm: str) -> None:
    assert rule(algorithm=algorithm, capacity=0, scope="search").sentence() == "nothing passes, per caller, on search"


def test_an_unknown_time_zone_is_refused() -> None:
    said = errors(unsaved(algorithm="calendar_window", timezone="Europe/Atlantis"))
    assert said == {
        "timezone": "unknown time zone 'Europe/Atlantis': use an IANA name such as 'UTC' or 'Europe/Paris'."
    }


def test_an_anchor_that_is_no_moment_is_refused() -> None:
    said = errors(unsaved(algorithm="calendar_window", anchor="the 31st"))
    assert "2026-01-31T06:00" in said["anchor"]
    said = errors(unsaved(algorithm="calendar_window", anchor="2026-01-31T06:00Z"))
    assert "has an offset" in said["anchor"]


def per_period(key_kind: str = "account", **fields: Any) -> Rule:
    return unsaved(algorithm="calendar_window", calendar_unit="billing_period", key_kind=key_kind, **fields)


def may_be_saved(row: Rule) -> bool:
    try:
        row.full_clean()
    except ValidationError:
        return False
    return True


def test_a_billing_period_has_the_time_zone_and_the_anchor_of_the_account() -> None:
    assert may_be_saved(per_period())
    assert errors(per_period(timezone="Asia/Tokyo", anchor="2026-01-10T00:00")) == {
        "timezone": "Leave the time zone empty: a billing period is in the time zone of the account.",
        "anchor": "Leave the anchor empty: a billing period starts at the billing anchor of the account.",
    }
    assert list(errors(per_period(timezone="UTC"))) == ["timezone"]
    assert "unknown time zone" in errors(per_period(timezone="Mars/Olympus"))["timezone"]
    row = per_period(timezone="Asia/Tokyo")
    assert "Leave the time zone empty" in row.unreadable()
    assert row.sentence() == (
        "not in force: Leave the time zone empty: a billing period is in the time zone of the account"
    )


@pytest.mark.parametrize(
    ("accounts", "promised", "kinds"),
    [
        (None, False, {"account", "caller", "user"}),
        ("hook", False, {"account"}),
        (None, True, {"account", "caller", "user", "api_key"}),
        ("hook", True, {"account", "caller", "user", "api_key"}),
    ],
)
def test_only_keys_with_one_account_have_its_billing_period(
    settings: Any, accounts: str | None, promised: bool, kinds: set[str]
) -> None:
    hook = None if accounts is None else lambda request: "acme"
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": hook, "ONE_ACCOUNT_PER_KEY": promised}
    assert {kind for kind in KeyKind.values if may_be_saved(per_period(kind))} == kinds
    said = {kind: errors(per_period(kind)) for kind in set(KeyKind.values) - kinds}
    assert {tuple(found) for found in said.values()} == {("key_kind",)}
    for kind in ("ip", "global", "view_key"):
        assert "other keys have no billing period" in said[kind]["key_kind"]
    for kind in {"caller", "user", "api_key"} - kinds:
        assert "set RATELIMITS['ONE_ACCOUNT_PER_KEY']" in said[kind]["key_kind"]
    assert {kind for kind in KeyKind.values if not per_period(kind).unreadable()} == kinds


def test_more_than_six_decimal_places_are_refused() -> None:
    assert "6 decimal places" in errors(unsaved(rate=Decimal("0.1234567")))["rate"]


def test_a_start_above_the_capacity_is_refused() -> None:
    assert "initial must be full, empty or a whole number" in errors(unsaved(initial="11"))["initial"]


@pytest.mark.parametrize(
    ("algorithm", "fields", "suggestion"),
    [
        ("leaky_bucket_queue", {"capacity": 10, "rate": 5, "period": 1}, "2"),
        ("leaky_bucket_queue", {"capacity": 10, "rate": 3, "period": 1}, "3.333334"),
        ("smooth_bursty", {"max_burst_seconds": 4}, "4"),
        ("smooth_warming_up", {"warm_up": 30}, "30"),
    ],
)
def test_an_algorithm_that_waits_asks_for_the_longest_wait(
    algorithm: str, fields: dict[str, Any], suggestion: str
) -> None:
    said = errors(unsaved(algorithm=algorithm, **fields, max_wait=None))
    assert said == {"max_wait": f"Write how many seconds a request is allowed to wait, such as {suggestion}."}


def test_what_belongs_to_another_algorithm_is_dropped() -> None:
    row = rule(algorithm="fixed_window", rate=5, sub_windows=3, weighted=True, warm_up=1, timezone="UTC", max_wait=4)
    assert (row.rate, row.sub_windows, row.weighted, row.warm_up) == (None, None, False, None)
    assert (row.timezone, row.max_wait) == ("", None)


def test_what_is_left_out_stays_empty_and_stands_for_its_default() -> None:
    for name, algorithm in ALGORITHMS.items():
        row = rule(name.replace("_", "-"), name)
        optional = {*fields_of(name)} - {*NEEDED[name]}
        assert {field: getattr(row, field) for field in optional} == {field: PARAMETERS[field] for field in optional}
        assert row.to_algorithm() == algorithm(**{field: NEEDED[name][field] for field in required_fields(name)})


@pytest.mark.parametrize("scope", ["*", "search", "search:POST", "search:POST,PUT", "*:DELETE"])
def test_a_scope_may_name_methods(scope: str) -> None:
    unsaved(scope=scope).full_clean()


@pytest.mark.parametrize("scope", ["", "search:", "search:post", "a b", "a:GET:PUT", "a,b"])
def test_a_scope_that_no_request_has_is_refused(scope: str) -> None:
    assert "scope" in errors(unsaved(scope=scope))


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"callers": "robots"}, "callers", "not a valid choice"),
        ({"group": "crew"}, "group", "No group has the name crew. These groups exist: staff."),
        ({"group": "staff", "callers": "anonymous"}, "group", "anonymous callers are in no group"),
        ({"except_scopes": "health:GET"}, "except_scopes", "health:GET is not a scope"),
        ({"except_scopes": "health, *"}, "except_scopes", "* is not a scope"),
        ({"except_scopes": "health", "scope": "search"}, "except_scopes", "only a rule for * has exceptions"),
        ({"except_scopes": "a" * 2001}, "except_scopes", "at most 2000 characters"),
        ({"refusal_status": 200}, "refusal_status", "not a valid choice"),
        ({"refusal_text": "x" * 501}, "refusal_text", "at most 500 characters"),
        ({"ipv4_prefix": 33}, "ipv4_prefix", "less than or equal to 32"),
        ({"ipv6_prefix": 65}, "ipv6_prefix", "less than or equal to 64"),
        ({"ipv4_prefix": 0}, "ipv4_prefix", "greater than or equal to 1"),
        ({"ipv4_prefix": 24, "key_kind": "user"}, "ipv4_prefix", "count per address or per caller"),
        ({"view_key": "arg:pk", "key_kind": "user"}, "view_key", "count per key that the view gives"),
        (
            {"view_key": "header", "key_kind": "view_key"},
            "view_key",
            "header is not the key of a view: write a text such",
        ),
        ({"view_key": "arg:pk=7", "key_kind": "view_key"}, "view_key", "arg:pk=7 is not the key of a view"),
    ],
)
def test_what_it_covers_is_validated(fields: dict[str, Any], field: str, text: str) -> None:
    Group.objects.create(name="staff")
    assert text in errors(unsaved(**fields))[field]


def test_many_scopes_can_be_excepted_and_are_written_in_one_form() -> None:
    row = unsaved(except_scopes=" ".join(f"health-{n}" for n in range(100)) + " health-0,, health-1")
    row.full_clean()
    assert row.except_scopes.split(", ") == [f"health-{n}" for n in range(100)]


def test_one_rule_bills_for_a_kind_of_key_and_a_meter() -> None:
    rule("monthly", bills=True, key_kind="account")
    assert errors(unsaved("daily", bills=True, key_kind="account")) == {
        "bills": "“monthly” already bills requests per account: untick “bills” in one of the two rules."
    }
    rule("tokens", bills=True, key_kind="account", meter="tokens")
    rule("per-user", bills=True, key_kind="user")


@pytest.mark.parametrize(
    ("algorithm", "fields"),
    [(name, {}) for name in ALGORITHMS if name not in ("fixed_window", "calendar_window")]
    + [("fixed_window", {"window_start": "first_hit"})],
)
def test_only_windows_that_lie_where_the_clock_says_may_be_prefetched(algorithm: str, fields: dict[str, Any]) -> None:
    row = unsaved(algorithm=algorithm, prefetch=10, **fields)
    assert "choose a fixed window at fixed times of the clock or a calendar window" in errors(row)["prefetch"]
    with pytest.raises(IntegrityError, match="ratelimits_rule_prefetch"), transaction.atomic():
        row.save()


@pytest.mark.parametrize("algorithm", ["fixed_window", "calendar_window"])
def test_windows_that_lie_where_the_clock_says_may_be_prefetched(algorithm: str) -> None:
    assert rule(algorithm=algorithm, prefetch=10).prefetch == 10


def test_a_rule_that_bills_may_be_prefetched() -> None:
    assert rule(algorithm="fixed_window", prefetch=10, bills=True).bills


def test_at_least_one_request_is_prefetched() -> None:
    assert "Write 1 or more" in errors(unsaved(algorithm="fixed_window", prefetch=0))["prefetch"]


def test_a_plan_takes_over_billing_only_under_the_same_name() -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    rule("monthly", bills=True, key_kind="account")
    assert (
        "give both rules the same name"
        in errors(unsaved("pro-monthly", plan=plan, bills=True, key_kind="account"))["bills"]
    )
    rule("monthly", plan=plan, bills=True, key_kind="account")


def test_a_default_rule_may_not_bill_what_a_plan_already_bills() -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    rule("pro-monthly", plan=plan, bills=True, key_kind="account")
    assert "“pro-monthly (Pro)” bills" in errors(unsaved("monthly", bills=True, key_kind="account"))["bills"]


def test_a_name_is_given_once_per_plan() -> None:
    plan = Plan.objects.create(name="Pro", slug="pro")
    rule()
    rule(plan=plan)
    assert errors(unsaved()) == {
        "__all__": "There is already a default rule with this name: change the existing rule, or choose a plan."
    }
    assert "This plan already has" in errors(unsaved(plan=plan))["__all__"]


def test_names_that_redis_would_confuse_are_refused() -> None:
    rule("plumless")
    assert "Choose another name" in errors(unsaved("buckeroo"))["name"]


@pytest.mark.parametrize(
    "fields",
    [
        {"rate": 0},
        {"period": -1},
        {"capacity": None},
        {"capacity": -1},
        {"mode": "sometimes"},
        {"key_kind": "planet"},
        {"on_failure": "panic"},
        {"callers": "robots"},
        {"refusal_status": 200},
        {"ipv4_prefix": 33},
        {"ipv6_prefix": 0},
        {"algorithm": "dice"},
        {"algorithm": "smooth_bursty", "max_wait": None},
    ],
)
def test_the_database_refuses_what_was_saved_without_validation(fields: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError):
        Rule(**{"name": "x", "algorithm": "token_bucket", "capacity": 10, "rate": 5, "period": 1, **fields}).save()


def test_the_database_refuses_a_second_billing_rule() -> None:
    unsaved("monthly", bills=True).save()
    with pytest.raises(IntegrityError):
        unsaved("daily", bills=True).save()


@pytest.mark.parametrize(
    ("algorithm", "fields", "sentence"),
    [
        ("token_bucket", {}, "5 requests per second, bursts to 10, per API key"),
        ("token_bucket", {"rate": 1, "period": 60}, "1 request per minute, bursts to 10, per API key"),
        ("token_bucket", {"initial": "empty"}, "5 requests per second, bursts to 10, empty at the start, per API key"),
        ("token_bucket", {"initial": "3"}, "5 requests per second, bursts to 10, 3 at the start, per API key"),
        ("token_bucket", {"max_wait": 2}, "5 requests per second, bursts to 10, waiting up to 2 seconds, per API key"),
        ("gcra", {"rate": Decimal("0.9")}, "0.9 requests per second, bursts to 10, per API key"),
        ("leaky_bucket", {}, "5 requests per second, from a leaky bucket of 10, per API key"),
        (
            "leaky_bucket_queue",
            {"delay_after": 3},
            (
                "5 requests per second, one by one, the first 3 at once, at most 10 waiting, "
                "waiting up to 2 seconds, per API key"
            ),
        ),
        (
            "leaky_bucket_queue",
            {"max_wait": 0},
            "5 requests per second, one by one, at most 10 waiting, per API key",
        ),
        ("fixed_window", {}, "100 requests per minute, in fixed windows, per API key"),
        (
            "fixed_window",
            {"window_start": "first_hit", "period": 2_592_000, "capacity": 1_000_000},
            "1,000,000 requests per 30 days, in windows that the first request opens, per API key",
        ),
        ("calendar_window", {}, "10,000 requests per calendar month (UTC), per API key"),
        (
            "calendar_window",
            {"timezone": "Europe/Paris", "anchor": "2026-01-31T06:00"},
            "10,000 requests per calendar month (Europe/Paris), counted from 2026-01-31 06:00, per API key",
        ),
        (
            "calendar_window",
            {"calendar_unit": "billing_period", "key_kind": "account", "capacity": 1000},
            "1,000 requests per billing period, per account",
        ),
        ("sliding_window", {}, "100 requests per minute, sliding in 10 steps, per API key"),
        (
            "sliding_window",
            {"sub_windows": 1, "weighted": True},
            "100 requests per minute, sliding in 1 step, counting a share of the oldest step, per API key",
        ),
        ("sliding_log", {"period": Decimal("0.5")}, "100 requests in any 0.5 seconds, per API key"),
        ("sliding_log", {"period": 90}, "100 requests in any 90 seconds, per API key"),
        ("sliding_log", {"period": 604_800}, "100 requests in any week, per API key"),
        (
            "smooth_bursty",
            {},
            "5 requests per second, saving the permits of up to 1 second, waiting up to 1 second, per API key",
        ),
        (
            "smooth_warming_up",
            {"warm_up": 120},
            (
                "5 requests per second, warming up over 2 minutes from 1/3 of this rate, waiting up to 1 second, "
                "per API key"
            ),
        ),
        (
            "concurrency",
            {"callers": "anonymous", "key_kind": "ip", "ipv4_prefix": 24},
            (
                "10 requests at once, each for up to 1 minute, per address, addresses by network: /24 for IPv4, /64 for"
                " IPv6, for anonymous callers"
            ),
        ),
        (
            "concurrency",
            {"callers": "authenticated", "except_scopes": "health, webhooks"},
            (
                "10 requests at once, each for up to 1 minute, per API key, for authenticated callers, except on"
                " health, webhooks"
            ),
        ),
        (
            "concurrency",
            {"key_kind": "view_key", "view_key": "header:x_tenant"},
            "10 requests at once, each for up to 1 minute, per header:X-Tenant",
        ),
        (
            "concurrency",
            {"group": "staff", "callers": "authenticated"},
            "10 requests at once, each for up to 1 minute, per API key, for the group staff",
        ),
        ("concurrency", {}, "10 requests at once, each for up to 1 minute, per API key"),
        (
            "concurrency",
            {"scope": "search:POST"},
            "10 requests at once, each for up to 1 minute, per API key, on search:POST",
        ),
        (
            "token_bucket",
            {"meter": "tokens", "key_kind": "global"},
            "5 tokens per second, bursts to 10, for everyone together",
        ),
    ],
)
def test_a_rule_reads_as_a_sentence(algorithm: str, fields: dict[str, Any], sentence: str) -> None:
    Group.objects.create(name="staff")
    assert rule(algorithm=algorithm, **{"key_kind": "api_key", **fields}).sentence() == sentence


def test_a_sentence_uses_the_unit_of_the_meter(settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "UNITS": {"traffic": "MB"}}
    assert rule(meter="traffic", key_kind="user").sentence() == "5 MB per second, bursts to 10, per user"


def test_a_row_that_makes_no_sense_says_so_instead_of_a_sentence() -> None:
    assert unsaved(rate=0).sentence() == "not in force: rate must be above 0, not 0"
