"""Test that the rates of a project are found, and become rules that decide as they did."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.http import HttpRequest, HttpResponse
from django.urls import include, path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.csrf import csrf_exempt
from django_ratelimit import decorators
from rest_framework import throttling
from rest_framework.decorators import action
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.routers import SimpleRouter
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from ratelimits.models import Rule
from ratelimits.moving.rates import Finding, plan, with_names
from ratelimits.throttling import AnonRateThrottle, UserRateThrottle
from tests.support.rows import rule

pytestmark = [pytest.mark.django_db, pytest.mark.urls("tests.moving.test_importing")]


def ratelimit(**arguments: Any) -> Callable[[Any], Any]:
    """Return django-ratelimit's decorator, for the type checker."""
    decorator: Callable[[Any], Any] = decorators.ratelimit(**arguments)
    return decorator


RATES = {"search": "30/min", "uploads": "20/day", "odd": "5/month", "none": None, "a b": "1/s"}


class Scoped(throttling.ScopedRateThrottle):
    THROTTLE_RATES = RATES


class Burst(throttling.UserRateThrottle):
    scope, rate = "burst", "60/min"


class Early(throttling.UserRateThrottle):
    scope, rate = "early", "10/m"


class Newest(throttling.UserRateThrottle):
    scope, rate = "newest", "2/min"


class OwnCode(throttling.SimpleRateThrottle):
    scope, rate = "own", "1/s"

    def get_cache_key(self, request: Request, view: APIView) -> str:
        return "everyone"


class Search(APIView):
    throttle_classes = [Scoped]
    throttle_scope = "search"


class Odd(Search):
    throttle_scope = "odd"


class Unlimited(Search):
    throttle_scope = "none"


class Spaced(Search):
    throttle_scope = "a b"


class Unknown(Search):
    throttle_scope = "unknown"


class Bursting(APIView):
    throttle_classes = [Burst, OwnCode]


class Earlier(APIView):
    throttle_classes = [Early]
    throttle_scope = "early"


class Several(APIView):
    throttle_classes = [Scoped, Early]
    throttle_scope = "search"


class Default(APIView):
    throttle_classes = [AnonRateThrottle, UserRateThrottle]


class Choosing(APIView):
    throttle_classes: list[Any] = []

    def get_throttles(self) -> list[Any]:
        return []


class Files(ViewSet):
    throttle_classes: list[Any] = []
    throttle_scope = None

    @action(detail=False, methods=["post"], throttle_classes=[Scoped], throttle_scope="uploads")
    def upload(self, request: Request) -> Response:
        return Response()

    @action(detail=False, throttle_classes=[Newest])
    def newest(self, request: Request) -> Response:
        return Response()


@ratelimit(key="ip", rate="5/m", method="POST")
@ratelimit(key="user_or_ip", rate="100/h")
def login(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@csrf_exempt
@ratelimit(key="user", rate="10/5m", group="report makers", block=False)
def reports(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@ratelimit(key="header:x-tenant", rate="5/m")
@ratelimit(key="ip", rate="50/m")
@ratelimit(key="get:team", rate="7/m")
@ratelimit(key="shop.keys.tenant", rate="3/m")
def by_header(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


def chosen(group: str, request: HttpRequest) -> str:
    return "1/s"


@ratelimit(key="ip", rate=chosen)
@ratelimit(key=chosen, rate="8/m")
@ratelimit(key="shop.keys.tenant", rate="9/m", group="dotted")
@ratelimit(key="nonsense", rate="6/m")
def by_code(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@method_decorator(ratelimit(key="ip", rate="100/10", method=decorators.ratelimit.UNSAFE), name="dispatch")
class Contact(View):
    @method_decorator(ratelimit(key="ip", rate="7/d"))
    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


router = SimpleRouter()
router.register("files", Files, basename="file")
urlpatterns = [
    *(path(view.__name__, view.as_view()) for view in (Search, Odd, Unlimited, Spaced, Unknown, Bursting)),
    *(path(view.__name__, view.as_view()) for view in (Earlier, Several, Default, Choosing)),
    path("login/", login),
    path("plain/", include([path("reports/", reports), path("header/", by_header), path("code/", by_code)])),
    path("contact/", Contact.as_view()),
    path("again/", Contact.as_view()),
    path("", include(router.urls)),
]


@pytest.fixture(autouse=True)
def _rates(settings: Any) -> None:
    rates = {"user": "1000/day", "anon": "100/day", "nobody": "1/s"}
    settings.REST_FRAMEWORK = {
        **settings.REST_FRAMEWORK,
        "DEFAULT_THROTTLE_CLASSES": [
            "ratelimits.throttling.AnonRateThrottle",
            "ratelimits.throttling.UserRateThrottle",
        ],
        "DEFAULT_THROTTLE_RATES": rates,
    }


def found() -> dict[str, Finding]:
    return {one.finding.found: one.finding for one in plan("default")}


def command(*arguments: str) -> str:
    out = StringIO()
    call_command("ratelimits_import", *arguments, stdout=out)
    return out.getvalue()


class TestThrottles:
    def test_a_throttle_of_all_views_becomes_a_rule_for_all(self) -> None:
        finding = found()["user: 1000/day"]
        assert finding.rule == {
            "name": "user",
            "algorithm": "sliding_log",
            "capacity": 1000,
            "period": 86_400,
            "except_scopes": "early, none, odd, search, unknown, uploads",
        }
        assert finding.where == ("all views by default",)
        (note,) = finding.notes
        assert note == (
            "The rule also limits tests.moving.test_importing.Bursting, tests.moving.test_importing.Files.newest,"
            " tests.moving.test_importing.Spaced. If it should not, give each of these views a throttle_scope, and add"
            " this scope to “except in scopes” of this rule."
        )

    def test_a_throttle_of_anonymous_clients_becomes_a_rule_for_them(self) -> None:
        rule = found()["anon: 100/day"].rule
        assert rule is not None
        assert (rule["key_kind"], rule["callers"], rule["capacity"]) == ("ip", "anonymous", 100)

    def test_a_scope_becomes_a_rule_for_this_scope(self) -> None:
        finding = found()["search: 30/min"]
        assert finding.rule is not None
        assert (finding.rule["scope"], finding.rule["capacity"], finding.rule["period"]) == ("search", 30, 60)
        assert [view.rpartition(".")[2] for view in finding.where] == ["Search", "Several"]

    def test_so_does_the_scope_of_an_action(self) -> None:
        finding = found()["uploads: 20/day"]
        assert (finding.rule or {})["scope"] == "uploads"
        assert finding.where == ("tests.moving.test_importing.Files.upload",)

    def test_a_throttle_of_some_views_needs_a_scope_on_them(self) -> None:
        finding = found()["burst: 60/min"]
        assert (finding.rule or {})["scope"] == "burst"
        assert finding.notes[-1] == "Give these views throttle_scope = 'burst'."

    def test_a_throttle_of_an_action_needs_a_scope_on_the_action(self) -> None:
        finding = found()["newest: 2/min"]
        assert finding.where == ("tests.moving.test_importing.Files.newest",)
        assert "@action(…, throttle_scope='newest'), and throttle_scope = None in its class" in finding.notes[-1]

    def test_a_rate_that_is_read_otherwise_than_people_do_is_said(self) -> None:
        finding = found()["odd: 5/month"]
        assert (finding.rule or {})["period"] == 60
        assert "reads this rate as 5 per 60 seconds" in finding.notes[-1]

    @pytest.mark.parametrize(
        ("rate", "why"),
        [
            ("own: 1/s", "decides in code of its own: get_cache_key"),
            ("a b: 1/s", "cannot name this scope"),
            ("none: None", "has no rate"),
            ("throttle_scope 'unknown'", "has no such scope"),
            ("nobody: 1/s", "No throttle of a view uses this rate"),
            ("early: 10/m", "A view has one scope"),
            ("get_throttles", "are not found"),
        ],
    )
    def test_what_cannot_be_said_is_shown_with_the_reason(self, rate: str, why: str) -> None:
        finding = found()[rate]
        assert finding.rule is None
        assert why in finding.notes[-1]


class TestDecorators:
    def test_each_decorator_of_a_view_becomes_a_rule(self) -> None:
        posts, all_methods = (one.finding.rule for one in plan("default") if "login" in one.finding.where[0])
        assert posts == {
            "name": "login",
            "algorithm": "fixed_window",
            "capacity": 5,
            "period": 60,
            "scope": "login:POST",
            "key_kind": "ip",
        }
        assert all_methods is not None
        assert (all_methods["name"], all_methods["scope"], all_methods["key_kind"]) == ("login-2", "login", "caller")

    def test_a_group_is_a_scope_and_block_false_is_the_shadow_mode(self) -> None:
        finding = found()["@ratelimit(key='user', rate='10/5m')"]
        assert finding.rule is not None
        assert (finding.rule["scope"], finding.rule["mode"]) == ("report-makers", "shadow")
        assert (finding.rule["capacity"], finding.rule["period"]) == (10, 300)
        assert finding.notes[0] == 'Write @limited("report-makers") instead of the decorator.'

    def test_classes_and_their_methods_are_looked_at(self) -> None:
        names = {one.finding.where: one.finding.rule for one in plan("default") if "Contact" in one.finding.where[0]}
        dispatched = names["tests.moving.test_importing.Contact",]
        assert (dispatched or {})["scope"] == "Contact:DELETE,PATCH,POST,PUT"
        assert (dispatched or {})["period"] == 10
        assert (names["tests.moving.test_importing.Contact.get",] or {})["scope"] == "Contact-get"

    @pytest.mark.parametrize(
        ("decorator", "spelling"),
        [
            (
                "key='header:x-tenant', rate='5/m'",
                '@limited("by_header", key=["header:x-tenant", "query:team"])',
            ),
            (
                "key=tests.moving.test_importing.chosen, rate='8/m'",
                "@limited(\"by_code\", key=lambda request: tests.moving.test_importing.chosen('by_code', request))",
            ),
            (
                "key='shop.keys.tenant', rate='9/m'",
                "@limited(\"dotted\", key=lambda request: shop.keys.tenant('dotted', request))",
            ),
        ],
    )
    def test_another_key_is_the_key_that_the_view_gives(self, decorator: str, spelling: str) -> None:
        finding = found()[f"@ratelimit({decorator})"]
        assert (finding.rule or {})["key_kind"] == "view_key"
        assert finding.notes[0] == f"Write {spelling} instead of the decorator."

    def test_the_rules_of_a_view_with_several_keys_name_them(self) -> None:
        names = "key='header:x-tenant', rate='5/m'", "key='get:team', rate='7/m'"
        found_rules = [found()[f"@ratelimit({name})"].rule or {} for name in names]
        assert [one["view_key"] for one in found_rules] == ["header:X-Tenant", "query:team"]

    def test_all_decorators_of_a_view_are_told_to_write_the_same(self) -> None:
        finding = found()["@ratelimit(key='ip', rate='50/m')"]
        assert (finding.rule or {})["key_kind"] == "ip"
        assert finding.notes[0] == found()["@ratelimit(key='header:x-tenant', rate='5/m')"].notes[0]

    def test_masks_of_addresses_are_prefixes_of_the_rule(self, settings: Any) -> None:
        settings.RATELIMIT_IPV4_MASK, settings.RATELIMIT_IPV6_MASK = 24, 128
        rule = found()["@ratelimit(key='ip', rate='7/d')"].rule
        assert rule is not None
        assert (rule["ipv4_prefix"], "ipv6_prefix" in rule) == (24, False)

    @pytest.mark.parametrize(
        ("decorator", "why"),
        [
            ("@ratelimit(key='shop.keys.tenant', rate='3/m')", "all lambdas have the same name"),
            ("@ratelimit(key='nonsense', rate='6/m')", "does not know this key"),
            ("@ratelimit(key='ip', rate=tests.moving.test_importing.chosen)", "is calculated for each request"),
        ],
    )
    def test_what_cannot_be_said_is_shown_with_the_reason(self, decorator: str, why: str) -> None:
        finding = found()[decorator]
        assert finding.rule is None
        assert why in finding.notes[0]


class TestNames:
    def test_rules_get_names_of_their_own(self) -> None:
        entries = [
            {"name": name, "scope": str(number)} for number, name in enumerate(["Ä b", "a-b", "x" * 60, "x" * 60])
        ]
        named = with_names(Finding(str(entry), ("view",), entry) for entry in entries)
        assert [(one.rule or {})["name"] for one in named] == ["a-b", "a-b-2", "x" * 40, f"{'x' * 36}-2"]


class TestCommand:
    def test_it_shows_first_and_writes_when_told_to(self) -> None:
        shown = command()
        assert "Nothing was written" in shown
        assert "rule search: 30 requests in any minute, per caller, on search" in shown
        assert "A rule limits only views with QuotaThrottle, the middleware or @limited" in shown
        assert Rule.objects.count() == 0
        written = command("--write")
        assert "added rule “search”" in written
        assert Rule.objects.count() == sum(one.finding.rule is not None for one in plan("default"))
        assert set(Rule.history.values_list("history_change_reason", flat=True)) == {"ratelimits_import"}

    def test_to_run_it_again_changes_nothing(self) -> None:
        command("--write")
        rows = list(Rule.objects.values())
        assert "Nothing to add: all these rules exist." in command("--write")
        assert list(Rule.objects.values()) == rows

    def test_a_rule_that_staff_have_changed_stays_as_it_is(self) -> None:
        rule("search", "sliding_log", capacity=99, period=60, scope="search")
        assert "rule search, which exists: not changed" in command("--write")
        assert Rule.objects.get(name="search").capacity == 99

    def test_it_says_that_no_header_is_trusted_without_num_proxies(self, settings: Any) -> None:
        settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "NUM_PROXIES": None}
        assert "NUM_PROXIES is not set" in command()

    def test_if_a_rule_is_refused_nothing_is_written(self, settings: Any) -> None:
        settings.REST_FRAMEWORK = {
            **settings.REST_FRAMEWORK,
            "DEFAULT_THROTTLE_RATES": {"user": f"{10**15}/day", "anon": None},
        }
        with pytest.raises(CommandError, match="Nothing was written"):
            command("--write")
        assert Rule.objects.count() == 0

    @pytest.mark.urls("tests.admin.urls")
    def test_a_project_without_rates_is_told_so(self, settings: Any) -> None:
        settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "DEFAULT_THROTTLE_CLASSES": []}
        settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "DEFAULT_THROTTLE_RATES": {}}
        assert command() == "No rates were found in the views of ROOT_URLCONF.\n"
