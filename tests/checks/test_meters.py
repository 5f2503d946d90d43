"""Test the checks of meters: views and rows that name a meter which METERS lacks, and views that name too many."""

from __future__ import annotations

from typing import Any

import pytest
from django.core import checks
from django.http import HttpRequest, HttpResponse
from django.urls import path

from ratelimits.billing.models import PlanPrice
from ratelimits.decorators import limited
from ratelimits.models import Plan, PlanInclusion
from ratelimits.quota.costs import MAX_FURTHER
from tests.support.rows import rule

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls(__name__)]


@limited(cost={"requests": 1, "pages": 2})
def view(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


urlpatterns = [path("view/", view)]


def found(databases: tuple[str, ...] = ("default",)) -> list[checks.CheckMessage]:
    messages = checks.run_checks(tags=["ratelimits"], include_deployment_checks=False, databases=databases)
    return [one for one in messages if one.id in ("ratelimits.E024", "ratelimits.W023")]


def declare(settings: Any, *names: str) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "METERS": list(names)}


def test_without_the_setting_a_few_meters_of_views_are_no_message() -> None:
    rule("tokens", meter="tokens")
    assert found() == []


def test_views_that_name_more_meters_than_a_process_accepts_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {f"m{number}": 1 for number in range(MAX_FURTHER + 1)}
    monkeypatch.setattr(view, "ratelimits", ("*", costs, None))
    (error,) = found()
    assert (error.id, error.level) == ("ratelimits.E024", checks.ERROR)
    assert error.msg == (
        "Views have a cost on 33 meters that no rule and no plan names: 'm0', 'm1', 'm10', 'm11', 'm12' and 28 more."
        " A process accepts at most 32 such meters."
    )
    assert error.hint == "List the meters of the project in RATELIMITS['METERS']."
    rule("m0", meter="m0")
    assert found() == []


def test_rows_whose_meter_the_setting_lacks_are_named(settings: Any) -> None:
    declare(settings, "pages")
    row = rule("words", meter="words")
    plan = Plan.objects.create(slug="pro", name="Pro", currency="EUR")
    PlanInclusion.objects.create(plan=plan, meter="mails", quantity=1)
    PlanPrice.objects.create(plan=plan, meter="tokens", unit_price=1)
    PlanPrice.objects.create(plan=plan, meter="pages", unit_price=1)
    PlanPrice.objects.create(plan=plan, meter="requests", unit_price=1)
    assert [(one.id, one.msg) for one in found()] == [
        ("ratelimits.W023", f"RATELIMITS['METERS'] lacks the meter {meter!r}, which this row names: {what}.")
        for meter, what in (
            ("mails", "included quantity of the plan 'pro'"),
            ("tokens", "price of the plan 'pro'"),
            ("words", f"rule {row.pk} (words)"),
        )
    ]
    assert found(databases=()) == []
    declare(settings, "pages", "mails", "tokens", "words")
    assert found() == []


def test_views_whose_requests_would_all_be_refused_are_an_error(settings: Any) -> None:
    declare(settings, "tokens")
    (error,) = found()
    assert (error.id, error.msg) == (
        "ratelimits.E024",
        "Views have a cost on meters that are not known: 'pages'.",
    )
    rule("pages", meter="pages")
    assert [one.id for one in found()] == ["ratelimits.W023"]


def test_a_wrong_setting_is_one_error_with_a_hint(settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "METERS": "tokens"}
    errors = [one for one in checks.run_checks(tags=["ratelimits"], databases=["default"]) if one.level >= checks.ERROR]
    (error,) = errors
    assert (error.id, error.msg) == ("ratelimits.E002", "RATELIMITS['METERS'] is 'tokens'.")
    assert error.hint == (
        'Write a list of at most 1_000 names of meters, such as ["requests", "tokens"]; or None. A name has 1 to 255'
        " letters from a to z, digits, '-' and '_'."
    )
