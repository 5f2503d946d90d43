from __future__ import annotations

import functools
import sys
import types
from typing import Any

import pytest
from django.conf import settings
from django.contrib.auth.middleware import PersistentRemoteUserMiddleware
from django.core import checks
from django.http import HttpRequest, HttpResponse
from django.test import override_settings
from django.urls import include, path
from django.utils.decorators import method_decorator
from rest_framework.authentication import SessionAuthentication
from rest_framework.decorators import action, api_view, throttle_classes
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.throttling import UserRateThrottle
from rest_framework.views import APIView
from rest_framework.viewsets import ViewSet

from ratelimits.decorators import limited
from ratelimits.middleware import QuotaMiddleware
from ratelimits.throttling import QuotaThrottle, ScopedRateThrottle
from tests.support.rows import rule
from tests.support.usage.traffic import flow, use


def messages(*databases: str, **changes: Any) -> list[checks.CheckMessage]:
    with override_settings(**changes):
        return checks.run_checks(tags=["ratelimits"], databases=databases)


def test_other_throttles_beside_ours_are_warned_of() -> None:
    ours = "ratelimits.throttling.QuotaThrottle"
    classes = [ours, "rest_framework.throttling.UserRateThrottle"]
    (warning,) = messages(REST_FRAMEWORK={"DEFAULT_THROTTLE_CLASSES": classes})
    assert warning.id == "ratelimits.W001"
    assert messages(REST_FRAMEWORK={"DEFAULT_THROTTLE_CLASSES": [ours]}) == []


def test_a_rate_that_the_throttles_cannot_read_is_an_error_that_says_what_to_write() -> None:
    rates = {"anon": "10/5min", "user": "100/month", "burst": "10", "none": None}
    ours = {"DEFAULT_THROTTLE_CLASSES": ["ratelimits.throttling.UserRateThrottle"], "DEFAULT_THROTTLE_RATES": rates}
    user, burst = messages(REST_FRAMEWORK=ours)
    assert (user.id, burst.id) == ("ratelimits.E009", "ratelimits.E009")
    assert user.msg == "REST_FRAMEWORK['DEFAULT_THROTTLE_RATES']['user'] is '100/month'."
    assert str(user.hint).startswith("“100/month” is not a rate: months and years have no fixed length.")
    its = {**ours, "DEFAULT_THROTTLE_CLASSES": ["rest_framework.throttling.UserRateThrottle"]}
    assert messages(REST_FRAMEWORK=its) == []


def test_a_middleware_that_authenticates_after_ours_is_an_error() -> None:
    """Users would be counted by their address."""
    ours, own = "ratelimits.middleware.QuotaMiddleware", "tests.checks.test_entry_points.OwnMiddleware"
    session = "django.contrib.sessions.middleware.SessionMiddleware"
    users = "django.contrib.auth.middleware.AuthenticationMiddleware"
    remote = "tests.checks.test_entry_points.OwnRemoteUser"
    paths = {**settings.RATELIMITS, "PATHS": ["/admin/"]}
    found = {
        order: [one for one in messages(MIDDLEWARE=list(order), RATELIMITS=paths) if one.id == "ratelimits.E052"]
        for order in [
            (session, ours, users),
            (ours, session, users),
            (own, session, users),
            (session, users, ours, remote),
            (session, users, ours),
            (session, users, remote, own, "no.such.middleware"),
            (session, ours),
        ]
    }
    assert [[one.msg.partition(", so")[0] for one in errors] for errors in found.values()] == [
        [f"MIDDLEWARE has {ours!r} before {users!r}"],
        [f"MIDDLEWARE has {ours!r} before {users!r}"],
        [f"MIDDLEWARE has {own!r} before {users!r}"],
        [f"MIDDLEWARE has {ours!r} before {remote!r}"],
        [],
        [],
        [],
    ]
    without_paths = messages(MIDDLEWARE=[ours, session, users])
    assert "ratelimits.E052" not in {one.id for one in without_paths}, "views limit their requests later"


def without_the_middleware() -> list[str]:
    return [name for name in settings.MIDDLEWARE if "ratelimits" not in name]


@limited()
def decorated(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


@functools.wraps(decorated)
def wrapped(request: HttpRequest) -> HttpResponse:
    return decorated(request)


@api_view()
@throttle_classes([])
@limited()
def api_decorated(request: Request) -> Response:
    return Response()


class Methods(ViewSet):
    throttle_classes = []

    @method_decorator(limited())
    def list(self, request: Request) -> Response:
        return Response()


class Throttled(ViewSet):
    throttle_classes = [QuotaThrottle]

    def list(self, request: Request) -> Response:
        return Response()


class Extra(ViewSet):
    throttle_classes = []

    @action(detail=False, throttle_classes=[QuotaThrottle])
    def extra(self, request: Request) -> Response:
        return Response()


class Free(APIView):
    throttle_classes = []


class OwnMiddleware(QuotaMiddleware):
    pass


class OwnRemoteUser(PersistentRemoteUserMiddleware):
    pass


def urlconf(*patterns: Any) -> str:
    module = types.ModuleType("urls_of_a_check")
    module.urlpatterns = list(patterns)  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return module.__name__


@pytest.mark.parametrize(
    ("changes", "decided"),
    [
        ({}, "names QuotaThrottle"),
        ({"REST_FRAMEWORK": {}, "RATELIMITS": {**settings.RATELIMITS, "PATHS": ["/admin/"]}}, "PATHS"),
    ],
)
def test_requests_that_settings_have_decided_need_the_middleware(changes: dict[str, Any], decided: str) -> None:
    (warning,) = messages(MIDDLEWARE=without_the_middleware(), **changes)
    assert warning.id == "ratelimits.W002"
    assert decided in warning.msg
    assert "'ratelimits.middleware.QuotaMiddleware' after AuthenticationMiddleware" in str(warning.hint)
    assert (
        messages(MIDDLEWARE=[*without_the_middleware(), "tests.checks.test_entry_points.OwnMiddleware"], **changes)
        == []
    )


@pytest.mark.parametrize(
    ("view", "name"),
    [
        (decorated, "tests.checks.test_entry_points.decorated"),
        (wrapped, "tests.checks.test_entry_points.decorated"),
        (api_decorated, "tests.checks.test_entry_points.api_decorated"),
        (Methods.as_view({"get": "list"}), "tests.checks.test_entry_points.Methods"),
        (Throttled.as_view({"get": "list"}), "tests.checks.test_entry_points.Throttled"),
        (Extra.as_view({"get": "extra"}, **Extra.extra.kwargs), "tests.checks.test_entry_points.Extra.extra"),
    ],
)
def test_a_view_that_is_decided_needs_the_middleware(view: Any, name: str) -> None:
    urls = urlconf(path("free/", Free.as_view()), path("api/", include([path("decided/", view)])))
    (warning,) = messages(MIDDLEWARE=without_the_middleware(), REST_FRAMEWORK={}, ROOT_URLCONF=urls)
    assert warning.id == "ratelimits.W002"
    assert warning.msg.endswith(f"the view {name}.")


def test_where_nothing_is_decided_nothing_needs_the_middleware() -> None:
    urls = urlconf(path("free/", Free.as_view()))
    assert messages(MIDDLEWARE=[], REST_FRAMEWORK={}, ROOT_URLCONF=urls) == []


class Kept(APIView):
    throttle_classes = [UserRateThrottle]


class Decorated(APIView):
    authentication_classes = [SessionAuthentication]
    throttle_classes = [UserRateThrottle]


@method_decorator(limited(), name="dispatch")
class Dispatched(APIView):
    authentication_classes = [SessionAuthentication]
    throttle_classes = [UserRateThrottle]


class Choosing(APIView):
    throttle_classes = [UserRateThrottle]

    def get_throttles(self) -> list[Any]:
        return [QuotaThrottle()]


class ByRate(APIView):
    authentication_classes = [SessionAuthentication]
    throttle_classes = [ScopedRateThrottle]


def test_views_that_keep_throttles_of_drf_are_named() -> None:
    urls = urlconf(
        path("kept/", Kept.as_view()),
        path("free/", Free.as_view()),
        path("rate/", ByRate.as_view()),
        path("decorated/", limited()(Decorated.as_view())),
        path("dispatch/", Dispatched.as_view()),
        path("choosing/", Choosing.as_view()),
        path("throttled/", Throttled.as_view({"get": "list"})),
    )
    warning, drop_in = messages(ROOT_URLCONF=urls)
    assert (warning.id, drop_in.id) == ("ratelimits.W005", "ratelimits.W011")
    assert warning.msg.endswith("throttles of Django REST framework: tests.checks.test_entry_points.Kept.")
    assert drop_in.msg.endswith("rates in code: tests.checks.test_entry_points.ByRate.")
    assert "ratelimits_import" in str(warning.hint)


class Leftover(APIView):
    throttle_classes = [UserRateThrottle, ScopedRateThrottle]


class OwnQuota(QuotaThrottle):
    pass


LEFT = [path("rate/", ByRate.as_view()), path("left/", Leftover.as_view()), path("free/", Free.as_view())]


@pytest.mark.parametrize("default", ["ratelimits.throttling.QuotaThrottle", f"{__name__}.OwnQuota"])
def test_views_that_keep_a_drop_in_throttle_are_named(default: str) -> None:
    defaults = {"DEFAULT_THROTTLE_CLASSES": [default]}
    decorated_view = path("decorated/", limited()(ByRate.as_view()))
    (warning,) = messages(REST_FRAMEWORK=defaults, ROOT_URLCONF=urlconf(*LEFT, decorated_view))
    assert warning.id == "ratelimits.W011"
    names = f"{__name__}.ByRate, {__name__}.Leftover"
    assert warning.msg == f"No rule limits these views, because their throttles have rates in code: {names}."
    assert "Delete throttle_classes in these views" in str(warning.hint)


def test_a_project_without_rules_by_default_chooses_its_drop_in_throttles() -> None:
    urls = urlconf(*LEFT[:1], path("throttled/", Throttled.as_view({"get": "list"})))
    drop_in = {"DEFAULT_THROTTLE_CLASSES": ["ratelimits.throttling.UserRateThrottle"]}
    assert messages(REST_FRAMEWORK=drop_in, ROOT_URLCONF=urls) == []


def test_a_class_of_the_project_as_the_default_throttle_asks_for_rules_too() -> None:
    own = {"DEFAULT_THROTTLE_CLASSES": [f"{__name__}.OwnQuota"]}
    (kept,) = messages(REST_FRAMEWORK=own, ROOT_URLCONF=urlconf(path("kept/", Kept.as_view())))
    assert kept.id == "ratelimits.W005"
    (middleware,) = messages(REST_FRAMEWORK=own, MIDDLEWARE=without_the_middleware(), ROOT_URLCONF=urlconf())
    assert middleware.id == "ratelimits.W002"
    both = {"DEFAULT_THROTTLE_CLASSES": [f"{__name__}.OwnQuota", "rest_framework.throttling.UserRateThrottle"]}
    (beside,) = messages(REST_FRAMEWORK=both, ROOT_URLCONF=urlconf())
    assert beside.id == "ratelimits.W001"


def test_a_view_keeps_its_throttles_if_the_middleware_or_nothing_asks_for_rules() -> None:
    urls = urlconf(path("kept/", Kept.as_view()))
    paths = {**settings.RATELIMITS, "PATHS": {"/kept/": {"api_views": True}}}
    assert messages(ROOT_URLCONF=urls, RATELIMITS=paths) == []
    assert messages(ROOT_URLCONF=urls, REST_FRAMEWORK={}) == []


def test_views_of_an_api_that_no_path_and_no_throttle_limits_are_named() -> None:
    urls = urlconf(
        path("api/free/", Free.as_view()),
        path("api/kept/", Kept.as_view()),
        path("api/decorated/", limited()(Decorated.as_view())),
        path("api/login/", Free.as_view()),
        path("page/", Free.as_view()),
    )

    def of(paths: Any, **changes: Any) -> list[checks.CheckMessage]:
        return messages(ROOT_URLCONF=urls, RATELIMITS={**settings.RATELIMITS, "PATHS": paths}, **changes)

    (warning,) = of(["/api/"], REST_FRAMEWORK={})
    assert warning.id == "ratelimits.W014"
    assert warning.msg.endswith(f"of Django REST framework: {__name__}.Free, {__name__}.Free.")
    (warning,) = of({"/api/": {}, "/api/login/": {"api_views": True}}, REST_FRAMEWORK={})
    assert warning.msg.endswith(f"of Django REST framework: {__name__}.Free.")
    assert of({"/api/": {"api_views": True}}, REST_FRAMEWORK={}) == of([], REST_FRAMEWORK={}) == []
    assert "ratelimits.W014" not in {one.id for one in of(["/api/"])}


@pytest.fixture
def _no_other_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget that other tests of this process have imported other entry points."""
    for name in ("ratelimits.ninja", "ratelimits.outbound"):
        monkeypatch.delitem(sys.modules, name, raising=False)


UNUSED: dict[str, Any] = {"REST_FRAMEWORK": {}, "MIDDLEWARE": []}


@pytest.mark.django_db(transaction=True)
@pytest.mark.usefixtures("_no_other_entry_points", "fsync_at_once")
def test_rules_that_nothing_asks_for_are_warned_of() -> None:
    urls = urlconf(path("free/", Free.as_view()))
    assert messages("default", ROOT_URLCONF=urls, **UNUSED) == [], "there are no rules"
    rule("minute")
    assert messages(ROOT_URLCONF=urls, **UNUSED) == [], "no database may be asked"
    said = {one.id: one for one in messages("default", ROOT_URLCONF=urls, **UNUSED)}
    assert said.keys() == {"ratelimits.W022"}
    warning = said["ratelimits.W022"]
    assert "'ratelimits.throttling.QuotaThrottle'" in str(warning.hint)
    decided = urlconf(path("decided/", decorated))
    assert "ratelimits.W022" not in [one.id for one in messages("default", ROOT_URLCONF=decided, **UNUSED)]
    assert messages("default") == [], "the demo project uses QuotaThrottle"
    urls = urlconf(path("free/", Free.as_view()))
    use(now=None)
    flow()
    assert messages("default", ROOT_URLCONF=urls, **UNUSED) == [], "the ledger has usage"


class Keyed(APIView):
    throttle_key: Any = ["header:X-Tenant", "field:email|lower", without_the_middleware]


class Mistyped(Keyed):
    throttle_key = "X-Tenant"


class Twice(Keyed):
    throttle_key = ["arg:pk", "arg:pk"]


class Costly(APIView):
    throttle_cost: Any = {"requests": 1, "tokens": "field:max_tokens"}
    throttle_cost_bounds: Any = {"tokens": (1, 8_000)}


class Unbounded(Costly):
    throttle_cost_bounds = None


class WronglyBounded(Costly):
    throttle_cost_bounds = {"tokens": 8_000}


class Nowhere(Costly):
    throttle_cost = {"tokens": "max_tokens"}


class Computed(Costly):
    throttle_cost_bounds = property(lambda self: {"tokens": (1, 2)})


def test_a_cost_of_a_view_that_no_request_could_have_is_an_error() -> None:
    views = Costly, Unbounded, WronglyBounded, Nowhere, Computed
    found = messages(ROOT_URLCONF=urlconf(*(path(f"{one.__name__}/", one.as_view()) for one in views)))
    assert {one.id for one in found} == {"ratelimits.E012"}
    errors = {one.msg: str(one.hint) for one in found}
    assert errors[f"The cost of {__name__}.Unbounded is not valid."] == (
        "throttle_cost_bounds has no bounds for 'tokens', whose cost is 'field:max_tokens'."
    )
    assert (
        "{'tokens': 8000} is not valid. Write a dict" in errors[f"The cost of {__name__}.WronglyBounded is not valid."]
    )
    assert "'max_tokens'" in errors[f"The cost of {__name__}.Nowhere is not valid."]
    assert len(errors) == 3


class KeyedThrottle(QuotaThrottle):
    throttle_key = "cookie:session"


class ByThrottle(APIView):
    throttle_classes = (KeyedThrottle,)


def test_a_key_of_a_view_that_is_not_valid_is_an_error() -> None:
    patterns = [path(f"{one.__name__}/", one.as_view()) for one in (Keyed, Mistyped, Twice, ByThrottle)]
    found = messages(ROOT_URLCONF=urlconf(*patterns))
    errors = {one.msg: str(one.hint) for one in found if one.id == "ratelimits.E011"}
    assert [name.rpartition(".")[2] for name in (msg.split(" ")[3] for msg in errors)] == [
        "ByThrottle",
        "Mistyped",
        "Twice",
    ]
    assert "such as 'header:X-Tenant'" in errors[f"The throttle_key of {__name__}.Mistyped is not valid."]
    assert "Two keys of a view have the same name" in errors[f"The throttle_key of {__name__}.Twice is not valid."]
