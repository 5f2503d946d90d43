"""Test the throttle class, through a real view and DRF's own client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.urls import path
from rest_framework.permissions import AllowAny
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.test import APIClient
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from project.models import ApiKey
from ratelimits.embedded import free_port
from ratelimits.models import Account, KeyOverride, Rule
from ratelimits.quota import from_memory
from ratelimits.throttling import QuotaThrottle
from tests.support.entry_points import Clock, away, begin_afresh, counted
from tests.support.raw import RawRedis
from tests.support.rows import rule

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls("tests.throttling.test_by_rules")]


class View(APIView):
    permission_classes = [AllowAny]

    def get(self, request: Request) -> Response:
        plain: Any = request._request
        wrapped: Any = request
        return Response({"allowed": plain.quota.allowed, "same": wrapped.quota is plain.quota})

    post = get


class Scoped(View):
    throttle_scope = "search"


class Number(View):
    throttle_cost = 5


class Mapping(View):
    throttle_cost = {"requests": 1, "tokens": 250}


class Method(View):
    def throttle_cost(self, request: Request) -> dict[str, int]:
        data: Any = request.data
        return {"requests": 1, "tokens": len(data.get("text", "").split())}


def priced(request: Request, view: APIView) -> int:
    return int(request.query_params.get("cost", 1)) * (2 if isinstance(view, Function) else 1)


class Function(View):
    throttle_cost = staticmethod(priced)


class Nothing(View):
    throttle_cost = None


class Failing(View):
    def get(self, request: Request) -> Response:
        raise RuntimeError("the view is broken")


class Set(ViewSet):
    permission_classes = [AllowAny]
    throttle_scope = "set"

    def list(self, request: Request) -> Response:
        return Response([])


urlpatterns = [
    path("plain/", View.as_view()),
    path("scoped/", Scoped.as_view()),
    path("number/", Number.as_view()),
    path("mapping/", Mapping.as_view()),
    path("method/", Method.as_view()),
    path("function/", Function.as_view()),
    path("nothing/", Nothing.as_view()),
    path("failing/", Failing.as_view()),
    path("set/", Set.as_view({"get": "list"})),
]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return begin_afresh(monkeypatch)


@pytest.fixture
def client() -> APIClient:
    return APIClient()


@pytest.fixture
def keyed() -> Callable[[str], APIClient]:
    """Return a client with an API key of an account."""

    def make(account: str) -> APIClient:
        Account.objects.get_or_create(identifier=account)
        user, _made = get_user_model().objects.get_or_create(username=account)
        key, secret = ApiKey.objects.issue(name="web", user=user, account=account)
        client = APIClient(headers={"Authorization": f"Api-Key {secret}"})
        client.limit_key = key.limit_key  # type: ignore[attr-defined]
        return client

    return make


def slow(name: str = "slow", capacity: int = 2, **more: Any) -> Rule:
    return rule(name, capacity=capacity, rate="0.000001", **more)


def test_the_throttle_is_the_only_one_and_nothing_else_is_to_be_written() -> None:
    assert View.throttle_classes == [QuotaThrottle]


class TestFields:
    def test_an_admitted_request_is_told_where_it_stands(self, client: APIClient) -> None:
        slow()
        response = client.get("/plain/")
        assert (response.status_code, response.json()) == (200, {"allowed": True, "same": True})
        assert response["RateLimit-Policy"] == '"slow";q=2;w=2000000'
        assert response["RateLimit"] == '"slow";r=1;t=1000000'
        assert "Retry-After" not in response

    def test_a_refused_one_too_and_retry_after_is_never_before_t(self, client: APIClient) -> None:
        slow(capacity=1)
        client.get("/plain/")
        response = client.get("/plain/")
        assert response.status_code == 429
        t = int(response["RateLimit"].rpartition("t=")[2])
        assert int(response["Retry-After"]) >= t > 0
        assert response["RateLimit"].startswith('"slow";r=0;')
        assert response["RateLimit-Policy"] == '"slow";q=1;w=1000000'
        assert "Expected available in" in response.json()["detail"]

    def test_a_refusal_that_never_ends_says_no_time(self, client: APIClient) -> None:
        slow(capacity=4)
        response = client.get("/number/")
        assert response.status_code == 429
        assert "Retry-After" not in response
        assert response.json()["detail"] == "Request was throttled."

    def test_after_a_view_that_failed_they_say_that_it_was_not_charged(self, client: APIClient) -> None:
        slow()
        client.raise_request_exception = False
        assert client.get("/failing/").status_code == 500
        assert client.get("/plain/")["RateLimit"].startswith('"slow";r=1;')

    def test_without_a_rule_there_are_none(self, client: APIClient) -> None:
        response = client.get("/plain/")
        assert response.status_code == 200
        assert "RateLimit" not in response
        assert "RateLimit-Policy" not in response

    def test_requests_of_one_view_do_not_share_fields(self, client: APIClient) -> None:
        slow(capacity=5)
        assert [client.get("/plain/")["RateLimit"].split(";")[1] for _ in range(5)] == [
            "r=4",
            "r=3",
            "r=2",
            "r=1",
            "r=0",
        ]


class TestScopes:
    def test_a_views_scope_is_what_a_rule_names(self, client: APIClient) -> None:
        slow("search", scope="search")
        assert [client.get("/scoped/").status_code for _ in range(3)] == [200, 200, 429]
        assert [client.get("/plain/").status_code for _ in range(3)] == [200, 200, 200]

    def test_and_its_method(self, client: APIClient) -> None:
        slow("writes", scope="search:POST")
        assert [client.post("/scoped/").status_code for _ in range(3)] == [200, 200, 429]
        assert [client.get("/scoped/").status_code for _ in range(3)] == [200, 200, 200]

    def test_a_method_that_the_view_lacks_is_charged_as_by_the_frameworks_own(self, client: APIClient) -> None:
        slow("few")
        assert [client.delete("/plain/").status_code for _ in range(3)] == [405, 405, 429]

    def test_head_is_governed_as_get_whose_handler_answers_it(self, client: APIClient, redis_client: RawRedis) -> None:
        row = slow("reads", scope="search:GET")
        assert [client.head("/scoped/").status_code for _ in range(2)] == [200, 200]
        assert client.get("/scoped/").status_code == 429
        assert client.head("/scoped/").status_code == 429
        from_memory.sender.flush()
        assert counted(redis_client) == {
            "a requests 0 - anonymous 1": 2,
            f"d requests {row.pk} - anonymous 1": 2,
        }

    def test_a_view_set_has_one_too(self, client: APIClient) -> None:
        slow("set", scope="set", capacity=1)
        assert [client.get("/set/").status_code for _ in range(2)] == [200, 429]


class TestCosts:
    @pytest.mark.parametrize(
        ("url", "left"),
        [
            ("/plain/", 99),
            ("/nothing/", 99),
            ("/number/", 95),
            ("/mapping/", 99),
            ("/function/?cost=7", 86),
            ("/function/?cost=0", 100),
        ],
    )
    def test_a_number_a_mapping_a_function_or_nothing(self, client: APIClient, url: str, left: int) -> None:
        slow(capacity=100)
        response = client.get(url)
        assert response["RateLimit"].split(";")[1] == f"r={left}"

    def test_a_method_is_asked_with_the_request(self, client: APIClient, redis_client: RawRedis) -> None:
        slow("words", meter="tokens", capacity=10)
        assert client.post("/method/", {"text": "one two three"}, format="json").status_code == 200
        assert client.post("/method/", {"text": "a b c d e f g h"}, format="json").status_code == 429
        assert counted(redis_client)["a tokens 0 - anonymous u"] == 3

    def test_each_meter_is_counted_at_its_cost(self, keyed: Callable[[str], APIClient], redis_client: RawRedis) -> None:
        client = keyed("acme")
        row = slow("words", meter="tokens", capacity=300, bills=True)
        assert [client.get("/mapping/").status_code for _ in range(2)] == [200, 429]
        key = client.limit_key  # type: ignore[attr-defined]
        assert counted(redis_client) == {
            f"a requests 0 acme {key} 1": 1,
            f"a tokens {row.pk} acme {key} n": 1,
            f"a tokens {row.pk} acme {key} u": 250,
            f"d requests {row.pk} acme {key} 1": 1,
            f"d tokens {row.pk} acme {key} n": 1,
            f"d tokens {row.pk} acme {key} u": 250,
        }


class TestWho:
    def test_a_key_a_user_and_an_account_have_limits_of_their_own(self, keyed: Callable[[str], APIClient]) -> None:
        slow("each", key_kind="api_key")
        slow("all", key_kind="account", capacity=3)
        one, other, stranger = keyed("acme"), keyed("acme"), keyed("globex")
        assert [one.get("/plain/").status_code for _ in range(3)] == [200, 200, 429]
        assert [other.get("/plain/").status_code for _ in range(2)] == [200, 429]
        assert [stranger.get("/plain/").status_code for _ in range(3)] == [200, 200, 429]

    def test_who_asks_without_a_key_is_an_address(self, client: APIClient) -> None:
        slow(key_kind="ip")
        statuses = [client.get("/plain/", REMOTE_ADDR="2001:db8::1").status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        assert client.get("/plain/", REMOTE_ADDR="2001:db8::9:9").status_code == 429
        assert client.get("/plain/", REMOTE_ADDR="2001:db8:0:1::1").status_code == 200

    @pytest.mark.parametrize("kind", ["ip", "caller"])
    def test_who_has_neither_key_nor_address_is_counted_with_all_such(
        self, client: APIClient, settings: Any, kind: str
    ) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "DENY_CACHE_SECONDS": 0}
        slow(key_kind=kind)
        assert [client.get("/plain/", REMOTE_ADDR="").status_code for _ in range(4)] == [200, 200, 429, 429]
        assert client.get("/plain/", REMOTE_ADDR="203.0.113.9").status_code == 200
        # Staff can give them other numbers.
        override = KeyOverride(key="ip:unknown", rule="slow", capacity=5)
        override.full_clean()
        override.save()
        assert [client.get("/plain/", REMOTE_ADDR="").status_code for _ in range(4)] == [200, 200, 200, 429]

    def test_a_forged_header_opens_no_door(self, client: APIClient) -> None:
        slow(key_kind="ip")
        forged = [client.get("/plain/", headers={"X-Forwarded-For": f"192.0.2.{n}"}).status_code for n in range(4)]
        assert forged == [200, 200, 429, 429]

    def test_a_wrong_key_is_refused_before_anything_is_counted(self, client: APIClient, redis_client: RawRedis) -> None:
        assert client.get("/plain/", headers={"Authorization": "Api-Key wrong"}).status_code == 401
        assert counted(redis_client) == {}

    def test_no_secret_reaches_the_server(self, keyed: Callable[[str], APIClient], redis_client: RawRedis) -> None:
        client: Any = keyed("acme")
        secret = client._credentials.get("HTTP_AUTHORIZATION", "") or client.defaults["HTTP_AUTHORIZATION"]
        slow(key_kind="api_key")
        client.get("/plain/")
        kept = b"".join(redis_client.keys("*")) + b"".join(
            field for key in redis_client.keys("*open") for field in redis_client.hkeys(key)
        )
        assert secret.split()[-1].encode() not in kept


class TestFailures:
    def test_while_the_server_is_away_requests_pass(self, client: APIClient, settings: Any) -> None:
        slow()
        away(settings, free_port())
        assert [client.get("/plain/").status_code for _ in range(5)] == [200] * 5

    def test_or_are_answered_503_and_not_429(self, client: APIClient, settings: Any) -> None:
        slow(on_failure="deny")
        away(settings, free_port())
        response = client.get("/plain/")
        assert (response.status_code, response["Retry-After"]) == (503, "1")
        assert response.json() == {"detail": "The quota of this request cannot be checked now."}


def test_a_throttle_that_was_not_asked_has_no_wait() -> None:
    assert QuotaThrottle().wait() is None


def test_a_view_may_do_without(client: APIClient, monkeypatch: pytest.MonkeyPatch, redis_client: RawRedis) -> None:
    slow(capacity=1)
    monkeypatch.setattr(View, "throttle_classes", [])
    monkeypatch.setattr(View, "get", lambda self, request: Response({}))
    assert [client.get("/plain/").status_code for _ in range(3)] == [200] * 3
    assert counted(redis_client) == {}
    assert from_memory.denials.take() == []
