"""Test that the throttle, the decorator and the middleware, sync and async, have the same powers.

docs/requests.md has a table of these powers. Each test here runs at each entry point.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import AnonymousUser, Group
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.test import RequestFactory
from django.urls import path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.test import force_authenticate
from rest_framework.views import APIView

from ratelimits.decorators import limited
from ratelimits.embedded import free_port
from ratelimits.middleware import QuotaMiddleware
from ratelimits.models import Access
from ratelimits.quota.answers.answer import Answer
from tests.support.entry_points import away, begin_afresh
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

#: A function that sends a request to a view with these properties, and returns the response.
Ask = Callable[..., HttpResponseBase]


def _request(user: Any, **meta: Any) -> HttpRequest:
    request = RequestFactory().get("/limited/", **meta)
    request.user = user or AnonymousUser()
    return request


def throttle(scope: str = "*", user: Any = None, **meta: Any) -> HttpResponseBase:
    class View(APIView):
        permission_classes = ()
        throttle_scope = scope

        def get(self, request: Request) -> Response:
            return Response()

    request = _request(user, **meta)
    if user is not None:
        force_authenticate(request, user=user)
    response: Any = View.as_view()(request)
    return cast("HttpResponseBase", response.render() if isinstance(response, Response) else response)


def decorator(scope: str = "*", user: Any = None, **meta: Any) -> HttpResponseBase:
    @limited(scope)
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    return view(_request(user, **meta))


def async_decorator(scope: str = "*", user: Any = None, **meta: Any) -> HttpResponseBase:
    @limited(scope)
    async def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    response: HttpResponseBase = asyncio.run(view(_request(user, **meta)))
    return response


def middleware(user: Any = None, **meta: Any) -> HttpResponseBase:
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    request: Any = _request(user, **meta)
    request.urlconf = (path("limited/", view),)
    response: Any = QuotaMiddleware(view)(request)
    return cast("HttpResponseBase", response)


def async_middleware(user: Any = None, **meta: Any) -> HttpResponseBase:
    async def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse()

    request: Any = _request(user, **meta)
    request.urlconf = (path("limited/", view),)
    answer: Any = QuotaMiddleware(view)(request)
    response: HttpResponseBase = asyncio.run(answer)
    return response


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "PATHS": ["/limited/"]}
    begin_afresh(monkeypatch)


ALL = throttle, decorator, async_decorator, middleware, async_middleware


@pytest.fixture(params=ALL, ids=lambda function: function.__name__)
def ask(request: pytest.FixtureRequest) -> Ask:
    function: Ask = request.param
    return function


def user(name: str, *groups: str) -> Any:
    row = get_user_model().objects.create(username=name)
    row.groups.set([Group.objects.get_or_create(name=group)[0] for group in groups])
    return row


def test_a_rule_for_anonymous_callers_lets_users_pass(ask: Ask) -> None:
    rule("visitors", capacity=0, callers="anonymous")
    assert [ask(user=who).status_code for who in (None, user("ann"))] == [429, 200]


def test_a_rule_for_authenticated_callers_lets_others_pass(ask: Ask) -> None:
    rule("members", capacity=0, callers="authenticated")
    assert [ask(user=who).status_code for who in (None, user("ann"))] == [200, 429]


def test_a_rule_for_a_group_limits_its_members_alone(ask: Ask) -> None:
    ann, bob = user("ann", "staff"), user("bob")
    rule("staff", capacity=0, group="staff")
    assert [ask(user=who).status_code for who in (None, ann, bob)] == [200, 429, 200]


@pytest.mark.parametrize("ask", [throttle, decorator, async_decorator], indirect=True)
def test_a_scope_can_opt_out_of_a_rule_for_all(ask: Ask) -> None:
    rule(capacity=0, except_scopes="health, webhooks")
    assert [ask(scope=scope).status_code for scope in ("*", "search", "health", "webhooks")] == [429, 429, 200, 200]


def test_addresses_can_be_counted_by_larger_networks(ask: Ask) -> None:
    rule("net", "fixed_window", capacity=1, key_kind="ip", ipv4_prefix=24, ipv6_prefix=56)
    addresses = "203.0.113.9", "203.0.113.10", "203.0.114.9", "2001:db8:1:100::1", "2001:db8:1:1ff::1", "2001:db8:2::1"
    assert [ask(REMOTE_ADDR=address).status_code for address in addresses] == [200, 429, 200, 200, 429, 200]


def test_the_address_may_come_from_another_header_of_trusted_proxies(ask: Ask, settings: Any) -> None:
    trusted = {"TRUSTED_PROXIES": ["10.0.0.0/8"], "ADDRESS_HEADER": "X-Real-IP"}
    settings.RATELIMITS = {**settings.RATELIMITS, **trusted}
    rule("once", "fixed_window", capacity=1, key_kind="ip")
    peers = (("10.0.0.1", "192.0.2.1"), ("10.0.0.2", "192.0.2.1"), ("198.51.100.7", "192.0.2.1"))
    assert [ask(REMOTE_ADDR=peer, HTTP_X_REAL_IP=header).status_code for peer, header in peers] == [200, 429, 200]


@pytest.mark.parametrize("status", [402, 403, 404, 503])
def test_a_rule_has_its_own_status_and_text(ask: Ask, status: int) -> None:
    rule("trial", "fixed_window", capacity=1, refusal_status=status, refusal_text="The trial is over.")
    assert [ask().status_code for _ in range(2)] == [200, status]
    refused: Any = ask()
    assert json.loads(refused.content)["detail"] == "The trial is over."
    assert int(refused["Retry-After"]) > 0
    assert refused["RateLimit"].startswith('"trial";r=0;')


def test_without_them_a_refusal_has_429_and_says_when_to_try_again(ask: Ask) -> None:
    rule("few", "fixed_window", capacity=1)
    ask()
    refused: Any = ask()
    assert refused.status_code == 429
    assert "second" in json.loads(refused.content)["detail"]


def own(request: HttpRequest, answer: Answer) -> HttpResponse | None:
    """Return a page of the project for a refusal; None while Redis is away."""
    if answer.unavailable:
        return None
    name = answer.binding.name if answer.binding is not None else "blocked"
    return HttpResponse(f"{request.path}: {name}", status=420)


def test_the_project_may_make_the_whole_response(ask: Ask, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "REFUSAL_RESPONSE": f"{__name__}.own"}
    rule("few", "fixed_window", capacity=1, refusal_status=403)
    assert ask().status_code == 200
    refused: Any = ask()
    assert (refused.status_code, refused.content) == (420, b"/limited/: few")
    assert int(refused["Retry-After"]) > 0
    assert refused["RateLimit"].startswith('"few";r=0;')


def test_the_function_of_the_documentation_works(ask: Ask, settings: Any, tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "requests.md").read_text()
    (snippet,) = re.findall(r"^```python\n(def refused.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"render": render}
    exec(compile(snippet, "docs/requests.md", "exec"), names)
    (tmp_path / "slow_down.html").write_text("{{ rule }}: {{ seconds|floatformat:0 }}")
    settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}]
    settings.RATELIMITS = {**settings.RATELIMITS, "REFUSAL_RESPONSE": names["refused"]}
    rule("few", "fixed_window", capacity=1, period=10**6, window_start="first_hit")
    ask()
    refused: Any = ask()
    assert (refused.status_code, refused.content) == (429, b"few: 1000000")


def test_its_response_is_also_that_of_a_block(ask: Ask, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "REFUSAL_RESPONSE": own}
    Access.objects.create(target="127.0.0.1", reason="asked")
    refused: Any = ask()
    assert (refused.status_code, refused.content) == (420, b"/limited/: blocked")


def test_it_may_leave_a_refusal_as_it_is(ask: Ask, settings: Any) -> None:
    policy = {"REFUSAL_RESPONSE": own, "FAILURE_POLICY": "deny"}
    settings.RATELIMITS = {**settings.RATELIMITS, **policy}
    rule()
    away(settings, free_port())
    assert ask().status_code == 503


def test_what_is_no_response_is_an_error_that_says_so(ask: Ask, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "REFUSAL_RESPONSE": lambda request, answer: "no"}
    rule(capacity=0)
    with pytest.raises(ImproperlyConfigured, match="must return a response of Django or None, not 'no'"):
        ask()


@pytest.mark.parametrize(("form", "start"), [("seconds", 0), ("epoch", 1)])
def test_the_reset_is_a_number_of_seconds_or_a_moment(ask: Ask, settings: Any, form: str, start: int) -> None:
    sent = {"X_RATELIMIT_HEADERS": True, "X_RATELIMIT_RESET": form}
    settings.RATELIMITS = {**settings.RATELIMITS, **sent}
    rule("few", "fixed_window", capacity=1, period=1000, window_start="first_hit")
    for response in (ask(), ask()):
        assert abs(int(response.headers["X-RateLimit-Reset"]) - start * time.time() - 1000) < 100


@pytest.mark.parametrize("shown", [True, False])
def test_the_fields_may_show_a_rule_in_shadow_mode(ask: Ask, settings: Any, shown: bool) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "SHADOW_HEADERS": shown}
    rule("few", "fixed_window", capacity=1, period=1000, window_start="first_hit", mode="shadow")
    for _ in range(2):
        response = ask()
        assert response.status_code == 200
        assert "Retry-After" not in response.headers
        found = response.headers.get("RateLimit-Policy"), response.headers.get("RateLimit", "").partition(";t=")[0]
        assert found == (('"few";q=1;w=1000', '"few";r=0') if shown else (None, ""))


def test_beside_a_rule_in_shadow_mode_the_tightest_shows(ask: Ask, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "SHADOW_HEADERS": True, "X_RATELIMIT_HEADERS": True}
    rule("a", "fixed_window", capacity=1, period=1000)
    rule("b", "fixed_window", capacity=3, period=1000, mode="shadow")
    first, second = ask(), ask()
    assert first.headers["RateLimit-Policy"] == '"a";q=1;w=1000, "b";q=3;w=1000'
    assert first.headers["X-RateLimit-Limit"] == "1"
    assert (second.status_code, second.headers["RateLimit"].partition(";t=")[0]) == (429, '"a";r=0')


def test_a_rule_in_shadow_mode_with_capacity_0_never_resets(ask: Ask, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "SHADOW_HEADERS": True}
    rule("none", "fixed_window", capacity=0, mode="shadow")
    rule("many", "fixed_window")
    assert ask().headers["RateLimit"] == '"none";r=0'
