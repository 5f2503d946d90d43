"""Test the decorator `limited` with the cases of django-ratelimit's own tests.

The cases are those of its file django_ratelimit/tests.py that rules and `limited` can express, in other words. Each
test has the name of its case. docs/moving.md lists the others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth.models import AnonymousUser, User
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.utils.decorators import method_decorator
from django.views.generic import View

from ratelimits.addresses import address_of
from ratelimits.algorithms import typed_rates
from ratelimits.algorithms.typed_numbers import Mistyped
from ratelimits.checks.settings import check_cache
from ratelimits.decorators import limited
from ratelimits.embedded import free_port
from ratelimits.identity import identify
from ratelimits.quota.standings import live_limits
from tests.support.entry_points import away, begin_afresh
from tests.support.rows import rule

pytestmark = pytest.mark.django_db

requests = RequestFactory()


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_afresh(monkeypatch)


def fixed(name: str, capacity: int, period: int = 60, **fields: Any) -> None:
    """Make a rule such as django-ratelimit's rates: a fixed window."""
    rule(name, "fixed_window", **{"capacity": capacity, "period": period, "scope": "view", "key_kind": "ip", **fields})


def plain(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


view = limited("view")(plain)


def asked(
    method: str = "get", user: User | None = None, by: Callable[..., Any] = view, address: str = "10.1.1.1"
) -> int:
    """Return the status of a request."""
    request = getattr(requests, method)("/", REMOTE_ADDR=address)
    request.user = user or AnonymousUser()
    return int(by(request).status_code)


class TestRates:
    @pytest.mark.parametrize(
        ("text", "rate"),
        [
            ("100/s", (100, 1)),
            ("100/10s", (100, 10)),
            ("100/m", (100, 60)),
            ("400/10m", (400, 600)),
            ("1000/h", (1000, 3600)),
            ("800/d", (800, 86_400)),
        ],
    )
    def test_simple(self, text: str, rate: tuple[int, int]) -> None:
        """Differs: "100/10" is refused, since a rate needs a unit of time."""
        assert tuple(map(int, typed_rates.rate(text))) == rate
        with pytest.raises(Mistyped):
            typed_rates.rate("100/10")

    def test_rate(self) -> None:
        fixed("two", 2)
        assert [asked("post") for _ in range(3)] == [200, 200, 429]

    def test_zero_rate(self) -> None:
        fixed("none", 0)
        assert asked("post") == 429

    def test_none_rate(self) -> None:
        assert [asked("post") for _ in range(7)] == [200] * 7

    @pytest.mark.parametrize(("anonymous", "authenticated"), [(1, 2), (0, 1), (0, 3)])
    def test_callable_rate(self, anonymous: int, authenticated: int) -> None:
        """The cases test_callable_rate_zero and _import too: two rules do what a callable rate by user does."""
        fixed("anonymous", anonymous, key_kind="ip", callers="anonymous")
        fixed("authenticated", authenticated, key_kind="user", callers="authenticated")
        for user, admitted in ((None, anonymous), (User(pk=1), authenticated)):
            assert [asked(user=user) for _ in range(3)] == [200] * admitted + [429] * (3 - admitted)

    def test_callable_rate_none(self) -> None:
        """A callable cost of 0 exempts a request, as a callable rate of None does."""
        fixed("one", 1)
        exempt = limited("view", cost=lambda request: 0 if request.GET.get("free") else 1)(plain)
        statuses = [exempt(requests.get(url)).status_code for url in ("/", "/", "/?free=1", "/?free=1")]
        assert statuses == [200, 429, 200, 200]


class TestKeys:
    def test_ip(self) -> None:
        fixed("one", 1)
        assert [asked(), asked(), asked(address="10.1.1.2")] == [200, 429, 200]

    def test_user_or_ip(self) -> None:
        fixed("one", 1, key_kind="caller")
        assert [asked(), asked(), asked(user=User(pk=1)), asked(user=User(pk=1))] == [200, 429, 200, 429]

    @pytest.mark.parametrize(
        ("key", "method", "values"),
        [
            ("query:foo", "get", [{"foo": "a"}, {"foo": "b"}]),
            ("field:foo", "post", [{"foo": "a"}, {"foo": "b"}]),
            (lambda request: request.META["REMOTE_ADDR"][::-1], "post", [{}]),
        ],
        ids=["test_key_get", "test_key_post", "test_callable_key"],
    )
    def test_key_of_the_view(self, key: Any, method: str, values: list[dict[str, str]]) -> None:
        """The cases test_key_get, test_key_post, test_callable_key and test_callable_key_path."""
        fixed("one", 1, key_kind="view_key")
        keyed = limited("view", key=key)(plain)
        for data in values:
            statuses = [keyed(getattr(requests, method)("/", data)).status_code for _ in range(2)]
            assert statuses == [200, 429]

    def test_key_header(self) -> None:
        fixed("one", 1, key_kind="view_key")
        keyed = limited("view", key="header:x-real-ip")(plain)
        addresses = ["1.2.3.4", "1.2.3.4", "1.2.3.5"]
        statuses = [keyed(requests.post("/", headers={"x-real-ip": text})).status_code for text in addresses]
        assert statuses == [200, 429, 200]

    def test_ratelimit_full_mask_v4(self) -> None:
        fixed("one", 1)
        assert [asked(address=f"10.1.1.{last}") for last in (1, 1, 2)] == [200, 429, 200]

    def test_ratelimit_mask_v6(self) -> None:
        fixed("one", 1)
        assert [asked(address=text) for text in ("2001:db8::1000", "2001:db8::1001", "2001:db9::1000")] == [
            200,
            429,
            200,
        ]

    def test_ratelimit_mask_v4(self) -> None:
        fixed("one", 1, ipv4_prefix=16)
        assert [asked(address=text) for text in ("10.1.1.1", "10.1.0.1", "192.168.1.1")] == [200, 429, 200]

    def test_default(self) -> None:
        assert address_of(requests.get("/", REMOTE_ADDR="1.2.3.4")) == "ip:1.2.3.4"

    def test_alternate_header(self, settings: Any) -> None:
        """Differs: the header is read only if the request comes from a trusted proxy."""
        proxies = {"TRUSTED_PROXIES": ["1.2.3.0/24"], "ADDRESS_HEADER": "X-Client-Ip"}
        settings.RATELIMITS = {**settings.RATELIMITS, **proxies}
        for peer, address in (("1.2.3.4", "ip:5.6.7.8"), ("9.9.9.9", "ip:9.9.9.9")):
            assert address_of(requests.get("/", REMOTE_ADDR=peer, headers={"x-client-ip": "5.6.7.8"})) == address

    def test_empty_ip(self) -> None:
        """Differs: it is not an error. All requests without an address are counted together."""
        fixed("one", 1)
        assert [asked(address=""), asked(address="")] == [200, 429]


class TestMethods:
    def test_method(self) -> None:
        fixed("posts", 1, scope="view:POST")
        assert [asked("post"), asked("post"), asked("get")] == [200, 429, 200]

    def test_unsafe_methods(self) -> None:
        fixed("unsafe", 0, scope="view:DELETE,PATCH,POST,PUT")
        assert [asked(method) for method in ("get", "head", "options")] == [200] * 3
        assert [asked(method) for method in ("delete", "post", "put", "patch")] == [429] * 4

    def test_stacked_methods(self) -> None:
        fixed("gets", 1, scope="view:GET")
        fixed("posts", 1, scope="view:POST")
        assert [asked(method) for method in ("get", "post", "get", "post")] == [200, 200, 429, 429]

    def test_sorted_methods(self) -> None:
        """Two views with one scope share a count, as two views with one group do."""
        fixed("both", 1, scope="view:GET,POST")
        other = limited("view")(plain)
        assert [asked(), asked("post", by=other)] == [200, 429]


class TestDecorators:
    def test_block(self) -> None:
        """Differs: the answer is 429 with the time of the next try, and not an exception for a 403."""
        fixed("one", 1)
        asked()
        request = requests.get("/", REMOTE_ADDR="10.1.1.1")
        answer = view(request)
        assert (answer.status_code, 0 < int(answer["Retry-After"]) <= 60) == (429, True)
        assert answer["Content-Type"] == "application/problem+json"

    def test_stacked_decorator(self) -> None:
        """Two rules of one scope do what two decorators do. A refused request is charged by neither."""
        fixed("minute", 1)
        fixed("day", 10, period=86_400)
        assert [asked(), asked()] == [200, 429]

    def test_method_decorator(self) -> None:
        class Posted(View):
            @method_decorator(limited("view"))
            def post(self, request: HttpRequest) -> HttpResponse:
                return HttpResponse()

        fixed("one", 1)
        assert [asked("post", by=Posted.as_view()) for _ in range(2)] == [200, 429]

    def test_class_decorator(self) -> None:
        @method_decorator(limited("view"), name="get")
        class Got(View):
            def get(self, request: HttpRequest) -> HttpResponse:
                return HttpResponse()

        fixed("one", 1)
        assert [asked(by=Got.as_view()) for _ in range(2)] == [200, 429]

    def test_wrap_view(self) -> None:
        class Got(View):
            def get(self, request: HttpRequest) -> HttpResponse:
                return HttpResponse()

        fixed("one", 1)
        wrapped = limited("view")(Got.as_view())
        assert [asked(by=wrapped), asked(by=wrapped), asked(by=Got.as_view())] == [200, 429, 200]

    def test_methods_counted_separately(self) -> None:
        class Both(View):
            @method_decorator(limited("view"))
            def get(self, request: HttpRequest) -> HttpResponse:
                return HttpResponse()

            post = get

        fixed("gets", 1, scope="view:GET")
        fixed("posts", 1, scope="view:POST")
        assert [asked(method, by=Both.as_view()) for method in ("get", "get", "post")] == [200, 429, 200]

    def test_views_counted_separately(self) -> None:
        other = limited("other")(plain)
        fixed("one", 1)
        fixed("another", 1, scope="other")
        assert [asked(), asked(), asked(by=other)] == [200, 429, 200]


class TestUsage:
    def test_get_usage(self) -> None:
        """The cases test_is_ratelimited and test_not_increment_after_increment too: looking charges nothing."""
        fixed("one", 1)
        request: Any = requests.get("/", REMOTE_ADDR="10.1.1.1")
        request.user = AnonymousUser()
        seen = []
        for _ in range(3):
            (limit,), error = live_limits(identify(request))
            assert limit.standing is not None
            assert error is None
            seen.append((limit.standing.allowed, limit.standing.remaining))
            if len(seen) == 2:
                asked()
        assert seen == [(True, 1), (True, 1), (False, 0)]

    def test_get_usage_increment(self) -> None:
        """The case test_is_ratelimited_increment too. Differs: a refused request is not counted."""
        fixed("one", 1)
        for remaining, allowed in ((0, True), (0, False)):
            request: Any = requests.get("/", REMOTE_ADDR="10.1.1.1")
            view(request)
            decision = request.quota.decision
            assert (decision.limit, decision.remaining, decision.allowed) == (1, remaining, allowed)
            assert 0 < decision.reset_after <= 60


class TestFailures:
    def test_bad_cache(self, settings: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "CACHE_ALIAS": "fake-cache"}
        assert [found.id for found in check_cache(None)] == ["ratelimits.E003"]

    def test_limit_on_cache_connection_error(self, settings: Any) -> None:
        """The cases of is_ratelimited with increment too. Differs: a rule refuses only if it says so, and with 503."""
        fixed("one", 1, on_failure="deny")
        away(settings, free_port())
        assert asked("post") == 503

    def test_fail_open_setting(self, settings: Any) -> None:
        fixed("one", 1, on_failure="allow")
        away(settings, free_port())
        assert [asked(), asked()] == [200, 200]
