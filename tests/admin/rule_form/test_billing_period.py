"""Test the form of a rule per billing period: what it offers, its help, and whom such a rule meets."""

from __future__ import annotations

import json
import time
from html import unescape
from typing import Any
from urllib.parse import parse_qsl

import pytest
from django.test import Client
from django.utils import translation

from ratelimits.admin.rule_form.forms import RuleForm
from ratelimits.admin.rule_form.starting_points import links
from ratelimits.algorithms.billing_periods import PeriodTerms
from ratelimits.algorithms.limits import Limit
from ratelimits.engine.decide import decide
from ratelimits.identity import Identity
from ratelimits.models import Account, Rule
from ratelimits.usage import recording
from ratelimits.usage.admin.affected import affected
from ratelimits.usage.admin.recorded import replayed
from ratelimits.usage.recording import Trace
from tests.admin.rule_form.test_affected import NOW, use, used
from tests.admin.test_rules import RULES, text
from tests.support.rows import rule, unsaved

pytestmark = pytest.mark.django_db

SECOND = 1_000_000
PER_PERIOD: dict[str, Any] = {
    "algorithm": "calendar_window",
    "calendar_unit": "billing_period",
    "capacity": 100,
    "key_kind": "account",
}


def day_and_hour(seconds: int) -> str:
    """Return a moment (s since 1970) as the anchor of an account in UTC."""
    return time.strftime("2024-01-%dT%H:%M", time.gmtime(seconds))


def test_the_form_offers_the_unit_with_its_help_and_hides_what_the_account_has() -> None:
    field: Any = RuleForm().fields["calendar_unit"]
    assert ("billing_period", "billing period") in [(value, str(label)) for value, label in field.choices]
    assert str(field.help_text).startswith("A billing period is that of the account that makes the request")
    hidden = json.loads(field.widget.attrs["data-ratelimits-hides"])
    assert hidden == {"billing_period": ["timezone", "anchor"]}
    with translation.override("zh-hans"):
        assert dict(field.choices)["billing_period"] == "计费周期"
        assert "账户" in str(field.help_text)


def test_a_starting_point_saves_a_limit_per_billing_period(admin_client: Client) -> None:
    (query,) = [query for query, words in links() if "billing period" in str(words)]
    page = admin_client.get(RULES + "add/" + query)
    assert f'href="{query}"' in unescape(page.content.decode())
    form = page.context["adminform"].form
    values = {name: form[name].value() for name in form.fields if form[name].value() not in (None, False, "")}
    assert admin_client.post(RULES + "add/", values).status_code == 302
    row = Rule.objects.get()
    assert (row.calendar_unit, row.key_kind, row.timezone, row.anchor) == ("billing_period", "account", "", "")
    assert row.sentence() == "100,000 requests per billing period, per account"
    assert dict(parse_qsl(query[1:])).keys() & {"timezone", "anchor"} == set()
    assert row.sentence() in text(admin_client.get(RULES))


def test_above_the_limit_are_those_that_used_it_in_their_own_period() -> None:
    """The period of the second account began an hour ago: the usage of two hours ago was in the one before."""
    Account.objects.create(identifier="b", billing_anchor=day_and_hour(NOW - 3_600))
    for name in "ab":
        used(use(f"user:{name}", 101, ago=7_200, account=name))
    row = unsaved(**PER_PERIOD)
    assert affected(row, row.to_algorithm(), NOW).above_limit == 1
    used(use("user:b", 101, account="b"))
    assert affected(row, row.to_algorithm(), NOW).above_limit == 2


def test_above_the_limit_are_those_that_redis_would_refuse_in_their_own_period() -> None:
    """Both accounts have spent everything, the second one in the period that ended an hour ago."""
    now = int(time.time())
    begun = now - now % 900 - 3_600
    Account.objects.create(identifier="b", billing_anchor=day_and_hour(begun))
    row = rule("per-period", **PER_PERIOD | {"capacity": 2})
    used(*(use(f"user:{name}", 1, ago=NOW - now, account=name) for name in "ab"))
    for name, terms, at in (("a", PeriodTerms(), now), ("b", PeriodTerms("UTC", day_and_hour(begun)), begun - 60)):
        limit = Limit(f"account:{name}", row.to_algorithm().in_periods_of(terms), row.name, cost=2)
        assert decide([limit], account=name, now=at * SECOND).allowed
    found = affected(row, row.to_algorithm(), now)
    assert (found.count, found.above_limit, found.are_accounts) == (2, 1, True)


def test_recorded_requests_are_decided_in_the_periods_of_their_accounts() -> None:
    """An hour ago a period of the second account began, so it has all permits again."""
    now = int(time.time())
    begun = now - now % 900 - 3_600
    Account.objects.create(identifier="b", billing_anchor=day_and_hour(begun))
    Account.objects.create(identifier="a", billing_anchor=day_and_hour(begun - 86_400 * 15))
    moments = [begun - 120, begun - 60, begun, begun + 60]
    who = {name: Identity(f"user:{name}", account=f"account:{name}") for name in "ab"}
    recording.write_rows(
        [(at * SECOND, who[name], "*", "GET", {"requests": 1}, False) for at in moments for name in "ab"]
    )
    rows: Trace = recording.newest((begun - 600) * SECOND, 100, {"*"})
    decided = replayed(unsaved("typed", **PER_PERIOD | {"capacity": 1}), rows)
    allowed = {name: [request.allowed for request in decided if request.key == f"account:{name}"] for name in "ab"}
    assert allowed == {"a": [True, False, False, False], "b": [True, False, True, False]}
