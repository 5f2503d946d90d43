"""Test that `manage.py check` warns of paths in PATHS that no view has, or that views have in some languages only."""

from __future__ import annotations

import re
import sys
import types
from typing import Any, cast

import pytest
from django.conf import settings
from django.conf.urls.i18n import i18n_patterns
from django.contrib import admin
from django.core import checks
from django.http import HttpRequest, HttpResponse
from django.test import override_settings
from django.urls import URLResolver, clear_url_caches, include, path, re_path, register_converter
from django.urls.resolvers import CheckURLMixin
from django.utils.translation import gettext_lazy


def page(request: HttpRequest, **arguments: Any) -> HttpResponse:
    return HttpResponse()


def login(request: HttpRequest) -> HttpResponse:
    return HttpResponse()


def urlconf(name: str, *patterns: Any) -> str:
    module = types.ModuleType(name)
    module.urlpatterns = list(patterns)  # type: ignore[attr-defined]
    sys.modules[name] = module
    return name


def warnings(paths: Any, *patterns: Any, **changes: Any) -> list[checks.CheckMessage]:
    root = urlconf("urls_of_paths", *patterns)
    with override_settings(ROOT_URLCONF=root, RATELIMITS={**settings.RATELIMITS, "PATHS": paths}, **changes):
        clear_url_caches()
        return checks.run_checks(tags=["ratelimits"], databases=[])


def unknown(paths: Any, *patterns: Any, **changes: Any) -> list[str]:
    """Return the paths that no view has."""
    found = warnings(paths, *patterns, **changes)
    return [name for one in found if one.id == "ratelimits.W008" for name in re.findall(r"'(/[^']*)'", one.msg)]


URLS = [
    path("admin/", admin.site.urls),
    path("files/", page),
    path("shop/", include([path("<int:pk>/", page), path("<slug:name>-<int:pk>/raw/", page), path("login", page)])),
    path("tree/<path:rest>", page),
    path("key/<uuid:key>/edit/", page),
    re_path(r"^old/(?P<pk>[^/.]+)/$", page),
    re_path(r"^old/list/?$", page),
    re_path(r"^api/v[12]/", include([re_path(r"^users/$", page)])),
    re_path(r"^open/", page),
    re_path(r"^left/$|^right/$", page),
    re_path(r"^(?P<word>this|that)/c/$", page),
]


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/fi", "/files", "/files/", "/admin/login/", "/admin/ratelimits/rule/", "/shop/", "/shop/7/"),
        *("/shop/7", "/shop/some-name-7/ra", "/shop/login", "/tree/a/b/", "/key/", "/old/", "/old/7/", "/old/list/"),
        *("/api/", "/api/v2/users/", "/api/v2/us", "/open/anything/", "/right/", "/that/c", "/key/00000000-0000"),
    ],
)
def test_a_path_with_which_a_view_begins_is_known(path: str) -> None:
    assert warnings([path], *URLS) == []


@pytest.mark.parametrize(
    "path",
    [
        *("/file/", "/files/x", "/admin/logn/", "/shop/export/", "/shop/login/", "/api/v2/user/", "/apis/"),
        *("/app/files/", "/olds/", "/these/", "/that/d/"),
    ],
)
def test_a_path_that_no_view_has_is_warned_of(path: str) -> None:
    (warning,) = warnings({"/files/": {}, path: {"scope": "x"}}, *URLS)
    assert warning.id == "ratelimits.W008"
    assert warning.msg == f"No view has a URL that begins with these paths of RATELIMITS['PATHS']: '{path}'."
    assert "Write each path as in the URLconf" in str(warning.hint)


def test_the_path_of_a_project_under_a_prefix_is_written_without_the_prefix() -> None:
    rest = path("<path:rest>", page)
    assert unknown(["/app/files/"], *URLS, rest, FORCE_SCRIPT_NAME="/app") == ["/app/files/"]
    assert unknown(["/files/"], *URLS, rest, FORCE_SCRIPT_NAME="/app") == []
    assert unknown(["/app/files/"], *URLS, path("app/files/", page), FORCE_SCRIPT_NAME="/app/") == []
    (warning,) = warnings(["/app/files/"], *URLS, FORCE_SCRIPT_NAME="/app")
    assert "without '/app', the FORCE_SCRIPT_NAME" in str(warning.hint)


def test_a_catch_all_view_has_every_path() -> None:
    for everything in (path("<path:rest>", page), re_path("", page), re_path(r"^.*$", page), re_path(r"^(.*)/$", page)):
        assert unknown(["/anything/"], *URLS, everything) == []


def test_the_urlconfs_of_tenants_are_searched_too() -> None:
    of_types = {"public": {"URLCONF": urlconf("urls_of_a_type", path("prices/", page))}, "shop": {}}
    public = {"PUBLIC_SCHEMA_URLCONF": urlconf("urls_in_public", path("about/", page)), "TENANT_TYPES": of_types}
    assert unknown(["/about/", "/prices/", "/nowhere/", "/files/"], *URLS, **public) == ["/nowhere/"]


def test_static_files_and_media_need_no_view() -> None:
    places = {"STATIC_URL": "/static/", "MEDIA_URL": "/media/"}
    assert unknown(["/static/", "/media/private/", "/stat/"], *URLS, **places) == ["/stat/"]
    elsewhere = {"STATIC_URL": "https://cdn.example.com/static/", "MEDIA_URL": ""}
    assert unknown(["/static/", "/media/"], *URLS, **elsewhere) == ["/static/", "/media/"]
    below = {"STATIC_URL": "/app/static/", "FORCE_SCRIPT_NAME": "/app"}
    assert unknown(["/static/"], *URLS, **below) == []
    nothing = {"STATIC_URL": "/app/static/", "MEDIA_URL": "/app/", "FORCE_SCRIPT_NAME": "/app"}  # Django's MEDIA_URL
    assert unknown(["/static/", "/stat/"], *URLS, **nothing) == ["/stat/"]


LANGUAGES = [("en", "English"), ("de", "German"), ("zh-hans", "Chinese")]


def test_a_path_below_a_language_has_the_language() -> None:
    urls = i18n_patterns(path("login/", login), path("files/", page))
    everywhere = [f"/{code}/" for code, _name in LANGUAGES]
    assert warnings(everywhere, *urls, LANGUAGES=LANGUAGES) == []
    assert unknown(["/login/", "/fr/login/"], *urls, LANGUAGES=LANGUAGES) == ["/login/", "/fr/login/"]
    assert unknown(["/en/login/"], *urls, LANGUAGES=LANGUAGES) == []


@pytest.mark.parametrize(
    ("prefixed", "paths"), [(True, ["/en/login/", "/de/login/"]), (False, {"/login/": {}, "/de/login/": {}})]
)
def test_a_view_that_is_limited_in_some_languages_only_is_warned_of(prefixed: bool, paths: Any) -> None:
    urls = i18n_patterns(path("login/", login), path("files/", page), prefix_default_language=prefixed)
    (warning,) = warnings(paths, *urls, LANGUAGES=LANGUAGES)
    assert warning.id == "ratelimits.W009"
    assert warning.msg == (
        "RATELIMITS['PATHS'] limits these views in some languages only: tests.checks.test_paths.login (not in zh-hans)."
    )
    assert warnings([*paths, "/zh-hans/login/"], *urls, LANGUAGES=LANGUAGES) == []


def test_what_is_not_understood_is_taken_for_known() -> None:
    class Pattern(CheckURLMixin):
        """A pattern of another package, such as one for hosts."""

        name = None
        converters: dict[str, Any] = {}

        def match(self, text: str) -> Any:
            return None

        def check(self) -> list[Any]:
            return []

        def __str__(self) -> str:
            return ""

    class Hundreds:
        regex = "[0-9]{3}"

        def to_python(self, value: str) -> int:
            raise AssertionError("the check calls no converter")

        to_url = to_python

    register_converter(cast("Any", Hundreds), "hundreds")
    urls = [re_path(r"^[ab]/c/$", page), path("<hundreds:number>/", page)]
    assert unknown(["/a/", "/100/", "/x/"], *urls) == []
    assert unknown(["/x/"], re_path(r"^(?:a/)?b/$|c/$", page)) == []
    translated = path(gettext_lazy("files/"), page)
    assert unknown(["/dateien/"], translated) == []
    assert unknown(["/x/"], URLResolver(cast("Any", Pattern()), [path("y/", page)])) == []


def test_a_setting_that_is_not_valid_and_a_project_without_urls_are_left_to_other_checks() -> None:
    assert [one.id for one in warnings("files", *URLS)] == ["ratelimits.E002"]
    with override_settings(ROOT_URLCONF=None, RATELIMITS={**settings.RATELIMITS, "PATHS": ["/files/"]}):
        assert "ratelimits.W008" not in [one.id for one in checks.run_checks(tags=["ratelimits"], databases=[])]
