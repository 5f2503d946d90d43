"""Test unknown names: the scopes and meters that the views of a URLconf name, and the keys that somebody has."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Group, User
from django.core.exceptions import ValidationError
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.test import RequestFactory
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from rest_framework.decorators import action, api_view
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from ratelimits import unknown_names
from ratelimits.decorators import limited
from ratelimits.engine.keys import ledger_name
from ratelimits.identity import api_key_of
from ratelimits.models import Access, Account, KeyOverride, Plan, PlanMembership
from ratelimits.models.keys import spelled_key
from ratelimits.moments import now
from ratelimits.row_files.comparing import compare
from ratelimits.row_files.tables import TABLES, read
from ratelimits.rules.grants import planned
from ratelimits.throttling import QuotaThrottle
from ratelimits.unknown_names import ViewNames, in_key, in_keys, in_row, in_rule, named_by_views
from tests.identity.conftest import Team
from tests.support.rows import rule


class Search(APIView):
    throttle_scope = "search"
    throttle_cost = {"requests": 1, "tokens": 250}


class Counted(APIView):
    def throttle_cost(self, request: Request) -> int:
        return 1


def tenant(request: HttpRequest) -> str:
    raise NotImplementedError


class ByTeam(QuotaThrottle):
    throttle_key = "query:team"


class Various(APIView):
    @property
    def throttle_key(self) -> str:
        return "chosen later"

    @property
    def throttle_scope(self) -> str:
        return "chosen later"


class Things(ViewSet):
    throttle_scope = "things"
    throttle_key = ("header:x-tenant", "arg:pk")
    throttle_classes = (ByTeam,)
    throttle_cost: int | dict[str, int] = 1

    def list(self, request: Request) -> Response:
        raise NotImplementedError

    @action(detail=False, throttle_scope="upload", throttle_cost={"bytes": 1})
    def upload(self, request: Request) -> Response:
        raise NotImplementedError


@limited("plain", cost={"pages": 2}, key=[tenant, "field:email|lower"])
def plain(request: HttpRequest) -> HttpResponse:
    raise NotImplementedError


@limited("awaited", cost=3)
async def awaited(request: HttpRequest) -> HttpResponse:
    raise NotImplementedError


class Methods(ViewSet):
    @method_decorator(limited("by action"))
    def list(self, request: Request) -> Response:
        raise NotImplementedError


@api_view()
@limited("by api view", cost={"calls": 1})
def api(request: Request) -> Response:
    raise NotImplementedError


@method_decorator(limited("by class"), name="dispatch")
class ByClass(View):
    pass


class ByMethod(View):
    @method_decorator(limited("by method"))
    def get(self, request: HttpRequest) -> HttpResponse:
        raise NotImplementedError


router = SimpleRouter()
router.register("things", Things, basename="thing")
KNOWN: list[Any] = [
    path("search/", Search.as_view()),
    path("other/", Search.as_view(throttle_scope="other")),
    path("exempt/", csrf_exempt(plain)),
    path("deeper/", include([path("awaited/", awaited), path("class/", ByClass.as_view())])),
    path("method/", ByMethod.as_view()),
    path("", include(router.urls)),
]


class Urls:
    """A URLconf, for @override_settings(ROOT_URLCONF=…)."""

    def __init__(self, *patterns: Any) -> None:
        self.urlpatterns = [*KNOWN, *patterns]


def named(settings: Any, *patterns: Any) -> ViewNames:
    settings.ROOT_URLCONF = Urls(*patterns)
    return named_by_views()


def test_what_views_name_is_known_from_the_urlconf(settings: Any) -> None:
    found = named(settings)
    scopes = {"*", "search", "other", "plain", "awaited", "by class", "by method", "things", "upload"}
    keys = {"header:X-Tenant", "arg:pk", "field:email|lower", "query:team", f"call:{__name__}.tenant"}
    assert found == ViewNames(frozenset(scopes), frozenset({"requests", "tokens", "pages", "bytes"}), frozenset(keys))


def test_a_decorated_function_of_an_api_is_found(settings: Any) -> None:
    found = named(settings, path("methods/", Methods.as_view({"get": "list"})), path("api/", api))
    assert found.scopes is not None
    assert {"by action", "by api view"} <= found.scopes
    assert found.meters is not None
    assert "calls" in found.meters


@pytest.mark.django_db(transaction=True)
def test_a_decorated_function_that_no_url_names_is_found(settings: Any) -> None:
    class Page:
        """A page of a content management system: the view of another package calls its method."""

        @method_decorator(limited("pages", cost={"pages-served": 1}, key="header:X-Tenant"))
        def serve(self, request: HttpRequest) -> HttpResponse:
            return HttpResponse()

    limited("operations", key=["arg:pk"], cost=7)  # the decorator for django-ninja notes the same
    found = named(settings)
    assert found.scopes is not None
    assert {"pages", "operations"} <= found.scopes
    assert found.meters is not None
    assert "pages-served" in found.meters
    assert found.keys is not None
    assert {"header:X-Tenant", "arg:pk"} <= found.keys
    assert list(in_rule("pages", "pages-served", view_key="header:X-Tenant")) == []
    size = len(unknown_names.all_given())
    for _ in range(3):
        assert Page().serve(RequestFactory().get("/")).status_code == 200
    assert len(unknown_names.all_given()) == size, "a request notes nothing"
    limited("any", cost=lambda request: 1)
    assert named(settings).meters is None


def test_what_a_view_works_out_for_each_request_is_not_known(settings: Any) -> None:
    assert named(settings, path("counted/", Counted.as_view())).meters is None
    assert named(settings, path("various/", Various.as_view())).scopes is None
    assert named(settings, path("counted/", limited(cost=lambda request: 1)(plain))).meters is None
    assert named(settings, path("various/", Various.as_view())).keys is None


def test_a_key_of_no_view_is_named_with_those_that_there_are(settings: Any) -> None:
    named(settings)
    settings.RATELIMITS = {**settings.RATELIMITS, "PATHS": {"/files/": {"key": ["query:page", "field:email"]}}}
    assert list(in_rule("*", "requests", view_key="arg:pk")) == []
    (sentence,) = in_rule("*", "requests", view_key="header:X-Team")
    assert "No view gives the key “header:X-Team” yet." in sentence
    assert "Keys of views: arg:pk, call:tests.test_unknown_names.tenant, field:email, " in sentence
    assert list(in_keys(["header:X-Team=a", "query:page=7", "field:email|lower=a@x.com"])) == ["header:X-Team=a"]


def test_a_scope_of_outbound_calls_is_known(settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "OUTBOUND_SCOPES": ["mailer-api"]}
    named(settings)
    assert list(in_rule("mailer-api", "tokenz")) == []


def test_a_scope_or_meter_of_no_view_is_named_with_those_that_there_are(settings: Any) -> None:
    settings.RATELIMITS = {**settings.RATELIMITS, "UNITS": {"storage": "GB"}, "METERS": ["mails"]}
    named(settings)
    (scope,) = in_rule("serach:POST", "tokens")
    assert "No view has the scope “serach”" in scope
    assert "Scopes of views: awaited, by class, by method, other, plain, search, things, upload." in scope
    (meter,) = in_rule("search:POST", "tokenz")
    assert "No view has a cost in “tokenz”" in meter
    assert "Meters of views: bytes, pages, requests, tokens." in meter
    assert [list(in_rule("*", known)) for known in ("requests", "storage", "mails")] == [[], [], []]


def test_an_excepted_scope_that_no_view_has_is_warned_of(settings: Any) -> None:
    named(settings)
    (scope,) = in_rule("*", "requests", "search, serach")
    assert scope.startswith("No view has the scope “serach”, so this exception has no effect.")


def test_a_method_that_no_request_has_is_named_with_those_that_there_are(settings: Any) -> None:
    named(settings)
    (method,) = in_rule("search:GET,GTE", "requests")
    assert "HTTP has no method “GTE”. Methods: DELETE, GET, HEAD, OPTIONS," in method
    assert list(in_rule("*:PATCH,TRACE", "requests")) == []


def test_nothing_is_said_of_what_cannot_be_known(settings: Any) -> None:
    named(settings, path("counted/", Counted.as_view()), path("various/", Various.as_view()))
    assert list(in_rule("serach", "tokenz")) == []


@pytest.mark.django_db
class TestKeys:
    def test_a_user_that_is_not_there_is_said(self) -> None:
        pk = User.objects.create(username="ann").pk
        assert list(in_key(f"user:{pk}")) == []
        for name in (f"0{pk}", str(pk + 1), "ann", "9" * 40):
            (said,) = in_key(f"user:{name}")
            assert f"No user has the primary key “{name}”" in said

    def test_an_account_is_a_row_or_by_default_a_user(self, settings: Any) -> None:
        Account.objects.create(identifier="acme")
        pk = User.objects.create(username="ann").pk
        assert "No account has the identifier “globex”" in next(in_key("account:globex"))
        assert list(in_key("account:acme")) == []
        assert len(list(in_key(f"account:{pk}"))) == 1
        settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": None}
        assert list(in_key(f"account:{pk}")) == []

    def test_many_keys_take_three_queries(self, settings: Any, django_assert_num_queries: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": None}
        pk = User.objects.create(username="ann").pk
        Account.objects.create(identifier="acme")
        known = [f"user:{pk}", f"account:{pk}", "account:acme", "api_key:4"]
        with django_assert_num_queries(3):
            said = in_keys([*known, *(f"{kind}:x{n}" for n in range(50) for kind in ("user", "account"))])
        assert len(said) == 100
        assert not {*known} & said.keys()

    @pytest.mark.parametrize("key", ["api_key:4", "ip:203.0.113.9"])
    def test_nothing_is_said_of_kinds_without_a_table(self, key: str) -> None:
        assert list(in_key(key)) == []

    @pytest.mark.parametrize("secret", ["sk_live_9", "a key with spaces ", "user:5", "ключ"])
    def test_an_api_key_with_its_secret_text_is_said_with_the_name_that_requests_have(self, secret: str) -> None:
        counted = api_key_of(secret)
        assert counted is not None
        for typed in {f"api_key:{secret}", spelled_key(f"api_key:{secret}")}:
            (said,) = in_key(typed)
            assert f"write {counted}, and delete the row" in said
            assert secret not in said
        assert list(in_key(counted)) == []
        block = Access.objects.create(target=f"api_key:{secret}", reason="abuse")
        assert [*in_row(block)] == [said]

    @pytest.mark.parametrize("secret", ["sk_live_9", "a key with spaces", "ключ"])
    def test_the_secret_text_of_an_api_key_is_refused_before_it_is_stored(self, secret: str) -> None:
        rule("burst")
        plan = Plan.objects.create(name="Free", slug="free")
        counted, typed = api_key_of(secret), spelled_key(f"api_key:{secret}")
        assert counted is not None
        said = f"Requests have only the digest of an API key that is a text: write {counted}."
        rows: list[tuple[str, Callable[[str], Model]]] = [
            ("target", lambda key: Access(target=key, effect="block", reason="abuse")),
            ("key", lambda key: KeyOverride(key=key, rule="burst", capacity=1, reason="asked")),
            ("key", lambda key: PlanMembership(key=key, plan=plan)),
        ]
        for field, row in rows:
            with pytest.raises(ValidationError) as refused:
                row(typed).full_clean()
            assert refused.value.message_dict == {field: [said]}
            row(counted).full_clean()
        with pytest.raises(ValidationError, match="only the digest"):
            planned(typed, "burst", 5, now() + timedelta(days=1))
        for model, line in ((KeyOverride, "key,rule,capacity\n{},burst,1"), (PlanMembership, "key,plan\n{},free")):
            table = TABLES[model]
            source = read(line.format(typed).encode(), table)
            ((compared,),) = compare(table, source, "default")
            assert compared.errors == [
                f"key: Requests have only the digest of an API key that is a text: write {counted}."
            ]

    def test_nothing_is_said_of_api_keys_that_requests_can_have(self) -> None:
        token = api_key_of(Team(pk="a" * 40))
        assert token is not None
        assert list(in_key(f"api_key:tests.team:{'a' * 40}")) != []
        for value in (7, -7, uuid4(), "x" * 300, Group(pk=3)):
            key = api_key_of(value)
            assert key is not None
            assert list(in_key(ledger_name(key))) == list(in_key(token)) == []
