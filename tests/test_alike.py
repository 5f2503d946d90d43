"""Test that the throttle, the decorator and the middleware, sync and async, have the same powers.

docs/requests.md has a table of these powers. Each test here runs at each entry point.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import AnonymousUser, Group
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.test import RequestFactory
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.test import force_authenticate
from rest_framework.views import APIView

from ratelimits.decorators import limited
from tests.support.entry_points import begin_afresh
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
    response: HttpResponseBase = View.as_view()(request).render()
    return response


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


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_afresh(monkeypatch)


@pytest.fixture(params=[throttle, decorator, async_decorator], ids=lambda function: function.__name__)
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
