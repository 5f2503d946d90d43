"""Test that the throttle, the decorator and the middleware, sync and async, have the same features.

docs/requests/index.md has a table of these features. Each test here runs at each entry point.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, cast
from urllib.parse import urlencode

import pytest
import redis
from django.contrib.auth import get_user_model
from django.contrib.auth.models import AnonymousUser, Group
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.shortcuts import render
from django.test import RequestFactory
from django.urls import path
from django.utils.functional import SimpleLazyObject
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.test import force_authenticate
from rest_framework.views import APIView

from ratelimits import rules
from ratelimits.answers.answer import Answer
from ratelimits.decorators import limited
from ratelimits.embedded import free_port
from ratelimits.middleware import QuotaMiddleware
from ratelimits.models import Access, KeyOverride, Plan, PlanMembership
from ratelimits.quota import receipts
from ratelimits.quota.costs import WrongCost
from ratelimits.throttling import QuotaThrottle
from ratelimits.usage.models import Line
from tests.support.entry_points import away, begin_afresh, counted
from tests.support.rows import rule

pytestmark = pytest.mark.django_db(transaction=True)

#: A function that sends a request to a view with these properties, and returns the response.
Ask = Callable[..., HttpResponseBase]


def _request(user: Any, team: str = "", data: Any = None, **meta: Any) -> HttpRequest:
    url = f"/limited/{team}/"
    request = RequestFactory().get(url, **meta) if data is None else RequestFactory().post(url, data, **meta)
    request.user = user or AnonymousUser()
    return request


def throttle(
    scope: str = "*",
    key: Any = None,
    cost: Any = None,
    user: Any = None,
    team: str = "7",
    bounds: Any = None,
    sent: Any = None,
    **more: Any,
) -> HttpResponseBase:
    class View(APIView):
        permission_classes = ()
        throttle_scope = scope
        throttle_cost = staticmethod(lambda request, view: cost(request)) if callable(cost) else cost
        throttle_key = staticmethod(lambda request, view: key(request)) if callable(key) else key
        throttle_cost_bounds = bounds

        def get(self, request: Request, team: str) -> Response:
            return Response(headers=sent)

        post = get

    request = _request(user, team, **more)
    if user is not None:
        force_authenticate(request, user=user)
    response: Any = View.as_view()(request, team=team)
    return cast("HttpResponseBase", response.render() if isinstance(response, Response) else response)


def decorator(
    scope: str = "*",
    key: Any = None,
    cost: Any = None,
    user: Any = None,
    team: str = "7",
    bounds: Any = None,
    sent: Any = None,
    **more: Any,
) -> HttpResponseBase:
    @limited(scope, cost, key, bounds)
    def view(request: HttpRequest, team: str) -> HttpResponse:
        return HttpResponse(headers=sent)

    return view(_request(user, team, **more), team=team)


def async_decorator(
    scope: str = "*",
    key: Any = None,
    cost: Any = None,
    user: Any = None,
    team: str = "7",
    bounds: Any = None,
    sent: Any = None,
    **more: Any,
) -> HttpResponseBase:
    @limited(scope, cost, key, bounds)
    async def view(request: HttpRequest, team: str) -> HttpResponse:
        return HttpResponse(headers=sent)

    response: HttpResponseBase = asyncio.run(view(_request(user, team, **more), team=team))
    return response


def _through_middleware(
    view: Any,
    scope: str = "*",
    key: Any = None,
    cost: Any = None,
    user: Any = None,
    team: str = "7",
    bounds: Any = None,
    **more: Any,
) -> Any:
    view.throttle_scope, view.throttle_key, view.throttle_cost, view.throttle_cost_bounds = scope, key, cost, bounds
    request: Any = _request(user, team, **more)
    request.urlconf = (path("limited/<str:team>/", view),)
    return QuotaMiddleware(view)(request)


def middleware(sent: Any = None, **asked: Any) -> HttpResponseBase:
    def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse(headers=sent)

    return cast("HttpResponseBase", _through_middleware(view, **asked))


def async_middleware(sent: Any = None, **asked: Any) -> HttpResponseBase:
    async def view(request: HttpRequest) -> HttpResponse:
        return HttpResponse(headers=sent)

    return asyncio.run(cast("Coroutine[Any, Any, HttpResponseBase]", _through_middleware(view, **asked)))


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


#: Costs that a client can send in a form. The last ones are within the bounds.
CLIENT_COSTS = [None, "", "lots", "-5", "0", "11", "2.5", "1e1", "٣", str(2**41), "9" * 5000, "nan", "1", "10", "+7"]
TOKENS = {"requests": 1, "tokens": "field:tokens"}


@pytest.mark.parametrize("place", [True, False], ids=["place", "function"])
def test_a_cost_that_the_client_chooses_is_within_bounds_or_400(
    ask: Ask, place: bool, redis_client: redis.Redis
) -> None:
    rule("tokens", "fixed_window", meter="tokens", capacity=18, period=86_400, key_kind="global")
    cost: Any = TOKENS if place else lambda request: {"requests": 1, "tokens": request.POST.get("tokens")}
    forms = [{} if text is None else {"tokens": text} for text in CLIENT_COSTS]
    answers: list[Any] = [ask(cost=cost, bounds={"tokens": (1, 10)}, data=form) for form in forms]
    assert [answer.status_code for answer in answers] == [400] * 12 + [200] * 3
    for answer in answers[:12]:
        body = json.loads(answer.content)
        assert body["detail"] == "The cost in tokens must be a whole number from 1 to 10."
        assert body.get("status", 400) == 400
    assert counted(redis_client)["a requests 0 - anonymous 1"] == 3
    assert ask(cost=cost, bounds={"tokens": (1, 10)}, data={"tokens": "1"}).status_code == 429


def test_the_text_that_a_function_gives_is_no_place(ask: Ask) -> None:
    cost = {"cost": lambda request: {"tokens": request.GET.get("tokens")}, "bounds": {"tokens": (1, 10)}}
    for text in ("query:other", "header:", "call:x", "field:tokens"):
        assert ask(**cost, QUERY_STRING=urlencode({"tokens": text, "other": "5"})).status_code == 400


@pytest.mark.parametrize(
    "value", [None, "lots", -5, [1], {"a": 1}, True, 2**41, 1.5, 0, 10**400, "", "[]", float("1e300")], ids=repr
)
def test_a_cost_in_json_is_within_bounds_or_400(value: Any) -> None:
    posted: dict[str, Any] = {"cost": TOKENS, "bounds": {"tokens": (1, 10)}, "content_type": "application/json"}
    refused: Any = throttle(**posted, data=json.dumps({"tokens": value}))
    assert refused.status_code == 400
    assert json.loads(refused.content) == {"detail": "The cost in tokens must be a whole number from 1 to 10."}
    for body in ("[]", "7", "null", '"tokens"', "{}"):
        assert throttle(**posted, data=body).status_code == 400
    assert [throttle(**posted, data=f'{{"tokens": {text}}}').status_code for text in ("7", '"7"', "7.0")] == [200] * 3


@pytest.mark.parametrize("place", ["query:n", "header:X-Cost", "arg:team"])
def test_a_cost_can_be_at_another_place(ask: Ask, place: str, redis_client: redis.Redis) -> None:
    bounds = {"requests": (0, 7)}
    assert ask(cost=place, bounds=bounds, QUERY_STRING="n=7", HTTP_X_COST="7").status_code == 200
    assert ask(cost=place, bounds=bounds, QUERY_STRING="n=8", HTTP_X_COST="8", team="8").status_code == 400
    assert sum(counted(redis_client).values()) == 8


@pytest.mark.parametrize(
    "bounds", [(1, 2), {"tokens": 5}, {"tokens": (5, 1)}, {"tokens": (-1, 1)}, {"tokens": (0, 2**41)}, {7: (0, 1)}]
)
def test_bounds_that_are_not_valid_are_said(ask: Ask, bounds: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"cost_bounds.*Write a dict of meters and the lowest"):
        ask(cost={"tokens": 1}, bounds=bounds)


def test_without_bounds_a_wrong_cost_stays_an_error_of_the_view(ask: Ask) -> None:
    with pytest.raises(WrongCost, match=r"not 'field:tokens'.*give its bounds \(throttle_cost_bounds\)"):
        ask(cost=TOKENS, data={"tokens": "5"})
    with pytest.raises(WrongCost, match="not 'lots'"):
        ask(cost={"tokens": "field:tokens", "pages": "lots"}, bounds={"tokens": (1, 9)}, data={"tokens": "5"})


@pytest.mark.parametrize("status", [402, 403, 404, 429, 503])
def test_no_cache_may_store_a_refusal(ask: Ask, status: int) -> None:
    rule("trial", "fixed_window", capacity=0, refusal_status=status)
    refused = ask()
    assert (refused.status_code, refused.headers["Cache-Control"]) == (status, "no-store, private")


def test_no_cache_may_store_a_block_or_an_answer_without_redis_or_to_a_wrong_cost(ask: Ask, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "FAILURE_POLICY": "deny"}
    assert ask(cost=lambda request: "lots", bounds={"requests": (1, 2)}).headers["Cache-Control"] == "no-store, private"
    Access.objects.create(target="203.0.113.9", reason="attack")
    blocked = ask(REMOTE_ADDR="203.0.113.9")
    assert (blocked.status_code, blocked.headers["Cache-Control"]) == (403, "no-store, private")
    rule("few", capacity=1)
    away(settings, free_port())
    unavailable = ask()
    assert (unavailable.status_code, unavailable.headers["Cache-Control"]) == (503, "no-store, private")


CACHEABLE = {"Cache-Control": "max-age=60", "CDN-Cache-Control": "max-age=9"}


def cacheable(request: HttpRequest, answer: Answer) -> HttpResponse:
    """Return a page for a refusal that says by itself that caches may store it."""
    return HttpResponse(
        "slow down", status=200, headers={"Cache-Control": "max-age=60", "CDN-Cache-Control": "max-age=9"}
    )


def kept_by_the_browser(request: HttpRequest, answer: Answer) -> HttpResponse:
    return HttpResponse("slow down", status=410, headers={"Cache-Control": "private, max-age=5"})


@pytest.mark.parametrize(
    ("function", "said"), [(cacheable, "no-store, private"), (kept_by_the_browser, "private, max-age=5")]
)
def test_no_shared_cache_may_store_a_response_of_the_project_to_a_refusal(
    ask: Ask, settings: Any, function: Any, said: str
) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "REFUSAL_RESPONSE": function}
    rule("nothing", capacity=0)
    refused = ask()
    # Django REST framework puts its own fields over those of the response.
    assert refused.headers["Cache-Control"] in (said, "no-store, private")
    assert "CDN-Cache-Control" not in refused.headers


#: What a view says about caches, and what the client receives. None: without the RateLimit fields.
CACHING: list[tuple[dict[str, str], str | None]] = [
    ({}, "private"),
    ({"Cache-Control": "max-age=60"}, "max-age=60, private"),
    ({"Cache-Control": "Private, max-age=60"}, "Private, max-age=60"),
    ({"Cache-Control": "no-store"}, "no-store"),
    ({"Cache-Control": 'max-age=60, private="Set-Cookie"'}, 'max-age=60, private="Set-Cookie", private'),
    ({"Cache-Control": "public, max-age=60"}, None),
    ({"Cache-Control": "max-age=0, S-MaxAge=60"}, None),
    ({"CDN-Cache-Control": "max-age=60"}, None),
    ({"Cache-Control": "private", "Surrogate-Control": "max-age=60"}, None),
]


@pytest.mark.parametrize(("sent", "received"), CACHING)
def test_no_shared_response_has_the_fields_of_one_caller(
    ask: Ask, settings: Any, sent: dict[str, str], received: str | None
) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "X_RATELIMIT_HEADERS": True}
    unlimited = ask(sent=sent)
    assert unlimited.headers.get("Cache-Control") == sent.get("Cache-Control")
    rule("few", capacity=5)
    limited_ = ask(sent=sent)
    if received is None:
        assert limited_.headers.get("Cache-Control") == sent.get("Cache-Control")
        assert not [name for name in limited_.headers if "ratelimit" in name.lower()]
    else:
        assert limited_.headers["Cache-Control"] == received
        assert {"RateLimit", "RateLimit-Policy", "X-RateLimit-Limit"} <= {*limited_.headers}


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
    assert (refused.status_code, refused.content) == (420, b"/limited/7/: few")
    assert int(refused["Retry-After"]) > 0
    assert refused["RateLimit"].startswith('"few";r=0;')


def test_the_function_of_the_documentation_works(ask: Ask, settings: Any, tmp_path: Path) -> None:
    page = (Path(__file__).parents[1] / "docs" / "requests" / "refusals.md").read_text()
    (snippet,) = re.findall(r"^```python\n(def refused.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {"math": math, "render": render}
    exec(compile(snippet, "docs/requests/refusals.md", "exec"), names)
    (tmp_path / "slow_down.html").write_text("{{ rule }}: {{ seconds }}")
    settings.TEMPLATES = [{**settings.TEMPLATES[0], "DIRS": [tmp_path]}]
    settings.RATELIMITS = {**settings.RATELIMITS, "REFUSAL_RESPONSE": names["refused"]}
    rule("few", "fixed_window", capacity=1, period=10**6, window_start="first_hit")
    ask()
    browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"
    refused: Any = ask(HTTP_ACCEPT=browser)
    assert (refused.status_code, refused.content) == (429, f"few: {refused['Retry-After']}".encode())
    for program in ({}, {"HTTP_ACCEPT": "*/*"}, {"HTTP_ACCEPT": "application/json"}):
        refused = ask(**program)
        assert (refused.status_code, b"few: " in refused.content) == (429, False)


def test_its_response_is_also_that_of_a_block(ask: Ask, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "REFUSAL_RESPONSE": own}
    Access.objects.create(target="127.0.0.1", reason="asked")
    refused: Any = ask()
    assert (refused.status_code, refused.content) == (420, b"/limited/7/: blocked")


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


def test_a_view_has_a_scope_and_a_cost(ask: Ask) -> None:
    rule("tokens", "fixed_window", scope="search", meter="tokens", capacity=100, period=1000)
    found = [ask(scope=scope, cost=lambda request: {"tokens": 60}).status_code for scope in ("search", "search", "*")]
    assert found == [200, 429, 200]


def _tenant(request: Any) -> str:
    return str(request.headers["X-Tenant"]).lower()


@pytest.mark.parametrize(
    ("key", "one", "other"),
    [
        ("header:X-Tenant", {"HTTP_X_TENANT": "a"}, {"HTTP_X_TENANT": "b" * 10_000}),
        ("query:team", {"QUERY_STRING": "team=a"}, {"QUERY_STRING": "team=b"}),
        ("field:email", {"data": {"email": "a@example.com"}}, {"data": {"email": "b@example.com"}}),
        ("arg:team", {"team": "a"}, {"team": "b"}),
        (_tenant, {"HTTP_X_TENANT": "A"}, {"HTTP_X_TENANT": "b"}),
    ],
)
def test_a_view_gives_a_key(ask: Ask, key: Any, one: dict[str, Any], other: dict[str, Any]) -> None:
    rule("tenant", "fixed_window", capacity=1, period=1000, key_kind="view_key")
    found = [ask(key=key, **asked) for asked in (one, one, other, other)]
    assert [response.status_code for response in found] == [200, 429, 200, 429]


@pytest.mark.parametrize(
    "key",
    ["header:X-Tenant", "query:team", "field:email", "arg:other", lambda request: None, lambda request: request.user],
)
def test_requests_without_the_value_share_one_key(ask: Ask, key: Any) -> None:
    rule("tenant", "fixed_window", capacity=1, period=1000, key_kind="view_key")
    addresses = "203.0.113.9", "203.0.113.10"
    assert [ask(key=key, REMOTE_ADDR=address).status_code for address in addresses] == [200, 429]


def test_a_rule_per_key_of_the_view_limits_no_view_without_one(ask: Ask) -> None:
    rule("tenant", capacity=0, key_kind="view_key")
    assert ask().status_code == 200


@pytest.mark.parametrize("alias", [" 7 ", "07", "+7", "\u0667", "7.0", "\uff17"])
def test_texts_that_a_view_reads_as_one_value_have_one_count(ask: Ask, alias: str) -> None:
    rule("tenant", "fixed_window", capacity=1, period=1000, key_kind="view_key")
    for key, asked in (
        ("arg:team", {"team": alias}),
        ("query:team", {"QUERY_STRING": urlencode({"team": alias})}),
        ("field:team", {"data": {"team": alias}}),
    ):
        same = {"team": "7"} if key == "arg:team" else {"data": {"team": "7"}} if "data" in asked else {}
        same = same or {"QUERY_STRING": "team=7"}
        assert [ask(key=key, **one).status_code for one in (asked, same)] == [200, 429]


def test_the_last_of_several_values_counts_as_the_view_reads_it(ask: Ask) -> None:
    rule("tenant", "fixed_window", capacity=1, period=1000, key_kind="view_key")
    asked = [{"QUERY_STRING": text} for text in ("team=a&team=b", "team=c&team=b", "team=b", "team=a")]
    assert [ask(key="query:team", **one).status_code for one in asked] == [200, 429, 429, 200]


def test_upper_and_lower_case_are_one_if_the_key_says_so(ask: Ask) -> None:
    rule("tenant", "fixed_window", capacity=1, period=1000, key_kind="view_key")
    values = [{"data": {"email": text}} for text in ("A@x.com", "a@x.com")]
    assert [ask(key="field:email", **one).status_code for one in values] == [200, 200]
    assert [ask(key="field:email|lower", **one).status_code for one in values] == [200, 429]


def _header_and_team(key: Any, team: str = "7", **asked: Any) -> dict[str, Any]:
    return {"key": ["header:X-Tenant", "arg:team"], "HTTP_X_TENANT": key, "team": team, **asked}


def test_each_rule_counts_the_key_that_it_names(ask: Ask) -> None:
    window: dict[str, Any] = {"algorithm": "fixed_window", "period": 1000, "key_kind": "view_key"}
    rule("first", capacity=3, **window)
    rule("team", capacity=2, view_key="arg:team", **window)
    rule("other", capacity=0, view_key="query:page", **window)
    asked = [("a", "7"), ("a", "7"), ("b", "7"), ("a", "8"), ("a", "9")]
    found = [ask(**_header_and_team(*one)) for one in asked]
    assert [response.status_code for response in found] == [200, 200, 429, 200, 429]
    assert ['"team"' in found[2].headers["RateLimit"], '"first"' in found[4].headers["RateLimit"]] == [True, True]


def test_a_value_has_a_limit_of_its_own(ask: Ask, redis_client: redis.Redis) -> None:
    """An override, a plan and a block of one value apply to each request with this value, and to no other."""
    window: dict[str, Any] = {"algorithm": "fixed_window", "period": 1000, "key_kind": "view_key"}
    rule("tenant", capacity=1, **window)
    KeyOverride.objects.create(key="header:x-tenant= Acme ", rule="tenant", capacity=2)
    plan = Plan.objects.create(slug="pro", name="Pro")
    rule("tenant", capacity=3, plan=plan, **window)
    PlanMembership.objects.create(key="header:X-Tenant=big", plan=plan)
    Access.objects.create(target="arg:team=13", reason="abuse")

    def statuses(count: int, *asked: Any) -> list[int]:
        return [ask(**_header_and_team(*asked)).status_code for _ in range(count)]

    assert statuses(3, "Acme") == [200, 200, 429]
    assert statuses(2, "other") == [200, 429]
    assert statuses(4, "big") == [200, 200, 200, 429]
    assert statuses(2, "new", "0013") == [403, 403]
    names = redis_client.keys()
    stored = [text for name in names for text in (name, redis_client.dump(name) or b"")]
    assert stored
    assert not any(b"Acme" in text or b"X-Tenant" in text for text in stored)


def test_an_allow_of_a_value_lets_its_requests_pass_but_not_blocked_ones(ask: Ask) -> None:
    rule("none", capacity=0)
    Access.objects.create(target="header:X-Tenant=acme", effect="allow", reason="partner")
    assert [ask(**_header_and_team(key)).status_code for key in ("acme", "other")] == [200, 429]
    Access.objects.create(target="203.0.113.9", reason="attack")
    assert ask(**_header_and_team("acme", REMOTE_ADDR="203.0.113.9")).status_code == 403


def _generator(request: Any) -> Any:
    yield "a"


async def _async_tenant(request: Any) -> str:
    await asyncio.sleep(0)
    return str(request.headers["X-Tenant"])


@pytest.mark.parametrize("key", [_generator, lambda request: object(), lambda request: True, lambda request: 1.5])
def test_a_function_whose_result_is_no_value_is_named(ask: Ask, key: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match=r"(?s)test_alike.*gives a value of the type .*Give a text"):
        ask(key=key)


def test_an_async_function_is_awaited(ask: Ask) -> None:
    rule("tenant", "fixed_window", capacity=1, period=1000, key_kind="view_key")
    asked = [{"HTTP_X_TENANT": tenant} for tenant in ("a", "a", "b")]
    assert [ask(key=_async_tenant, **one).status_code for one in asked] == [200, 429, 200]


def _group(request: Any) -> Any:
    return Group.objects.get(name=request.headers["X-Tenant"])


def _lazy_group(request: Any) -> Any:
    return SimpleLazyObject(lambda: _group(request))


@pytest.mark.parametrize("key", [_group, _lazy_group])
def test_a_function_may_make_a_query_and_return_a_row(ask: Ask, key: Any) -> None:
    for name in ("a", "b"):
        Group.objects.create(name=name)
    rule("tenant", "fixed_window", capacity=1, period=1000, key_kind="view_key")
    asked = [{"HTTP_X_TENANT": tenant} for tenant in ("a", "a", "b")]
    assert [ask(key=key, **one).status_code for one in asked] == [200, 429, 200]


def test_two_keys_with_one_name_are_refused(ask: Ask) -> None:
    with pytest.raises(ImproperlyConfigured, match="same name"):
        ask(key=["header:X-Tenant", "header:x_tenant"])


def test_the_value_itself_is_stored_nowhere(ask: Ask, redis_client: redis.Redis) -> None:
    rule("tenant", "fixed_window", capacity=1, period=1000, key_kind="view_key")
    ask(key="header:Authorization", HTTP_AUTHORIZATION="Bearer s3cret")
    names = redis_client.keys()
    assert names
    assert not any(b"s3cret" in text for name in names for text in (name, redis_client.dump(name) or b""))


@pytest.mark.parametrize("key", ["X-Tenant", "header:", "cookie:session", "header"])
def test_a_key_of_another_form_says_what_to_write(ask: Ask, key: str) -> None:
    with pytest.raises(ImproperlyConfigured, match="such as 'header:X-Tenant'"):
        ask(key=key)


@pytest.mark.parametrize("function", [middleware, async_middleware])
def test_a_path_of_the_middleware_may_have_options(settings: Any, function: Ask) -> None:
    options = {"scope": "files", "cost": 2, "key": "arg:team"}
    settings.RATELIMITS = {**settings.RATELIMITS, "PATHS": {"/limited/": options, "/": {"scope": "site"}}}
    rule("files", "fixed_window", scope="files", capacity=2, period=1000, key_kind="view_key")
    rule("site", scope="site", capacity=0)
    plain: dict[str, Any] = {"scope": None}
    assert [function(team=team, **plain).status_code for team in ("a", "a", "b")] == [200, 429, 200]
    # The view's own attributes come first.
    assert [function(scope="other", team="a").status_code, function(scope="site").status_code] == [200, 429]


def test_a_request_waits_where_a_rule_says_so(ask: Ask) -> None:
    rule("spaced", "leaky_bucket_queue", capacity=1, rate=20, period=1, max_wait=1)
    start = time.monotonic()
    assert [ask().status_code for _ in range(2)] == [200, 200]
    assert time.monotonic() - start > 0.04


def test_the_view_finds_the_answer_at_its_request(ask: Ask) -> None:
    rule("many", "fixed_window")
    seen: list[Any] = []

    def cost(request: Any) -> int:
        seen.append(request)
        return 3

    ask(cost=cost)
    plain = getattr(seen[0], "_request", seen[0])
    assert receipts.settle(plain, {"requests": 1}) is not None
    assert plain.quota.binding.name == "many"


def test_a_throttle_class_may_have_a_key() -> None:
    class TenantThrottle(QuotaThrottle):
        throttle_key = "header:X-Tenant"

    class View(APIView):
        permission_classes = ()
        throttle_classes = (TenantThrottle,)

        def get(self, request: Request) -> Response:
            return Response()

    rule("tenant", "fixed_window", capacity=1, period=1000, key_kind="view_key")
    found = [View.as_view()(_request(None, HTTP_X_TENANT=tenant)).status_code for tenant in ("a", "a", "b")]
    assert found == [200, 429, 200]


def test_a_rule_may_start_from_the_ledger(ask: Ask, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": None}
    ann = user("ann")
    start = rules.reload().billing(f"account:{ann.pk}").boundaries[1] // 10**6
    counts = ("admitted", "denied", "refunded", "shadow")
    row: dict[str, Any] = {f"{kind}_{of}": 0 for kind in counts for of in ("requests", "units")}
    row |= {"id": 1, "batch_id": 1, "rule": 0, "version": 0, "checksum": 0, "bin": start}
    Line.objects.create(account=str(ann.pk), key=f"user:{ann.pk}", meter="requests", **row | {"admitted_units": 4})
    rule("monthly", "calendar_window", capacity=5, start_from_ledger=True)
    assert [ask(user=ann).status_code for _ in range(2)] == [200, 429]


def test_a_meter_that_is_not_known_is_an_error_that_names_the_view_and_the_setting(ask: Ask, settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "METERS": ["tokens"]}
    assert ask(cost=lambda request: {"tokens": 1}).status_code == 200
    with pytest.raises(WrongCost) as error:
        ask(cost=lambda request: {"typo": 1})
    view, _colon, said = str(error.value).partition(": ")
    assert view.startswith("tests.test_alike.")
    assert said == "the meter 'typo' is not known: add it to RATELIMITS['METERS'], or make a rule for it"
