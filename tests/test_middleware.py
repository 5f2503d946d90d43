"""Test the middleware in a project under a prefix, such as "/app"."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from io import BytesIO
from typing import Any

import pytest
from django.core.handlers.asgi import ASGIRequest
from django.http import HttpRequest, HttpResponse
from django.test import Client
from django.urls import path
from django.views import View

from ratelimits.middleware import QuotaMiddleware
from ratelimits.unknown_names import in_rule
from tests.support.entry_points import begin_afresh
from tests.support.rows import rule

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.urls("tests.test_middleware")]


def page(request: HttpRequest) -> HttpResponse:
    return HttpResponse(request.path)


async def apage(request: HttpRequest) -> HttpResponse:
    return HttpResponse(request.path)


class Configured(View):
    throttle_scope = throttle_key = throttle_cost = None

    def get(self, request: HttpRequest) -> HttpResponse:
        return HttpResponse()


urlpatterns = [
    path("admin/login/", page),
    path("app/admin/login/", page),
    path("as-view/", Configured.as_view(throttle_scope="export", throttle_key="query:team")),
]


def at_script_name(settings: Any) -> Any:
    """Ask as a WSGI server does that serves the project below a path."""
    return Client().get("/admin/login/", SCRIPT_NAME="/app")


def at_forced_script_name(settings: Any) -> Any:
    """Ask as a proxy does that takes the prefix away."""
    settings.FORCE_SCRIPT_NAME = "/app"
    return Client().get("/admin/login/")


def at_root_path(settings: Any) -> Any:
    """Ask as an ASGI server does that serves the project below a path."""
    scope = {"type": "http", "method": "GET", "path": "/app/admin/login/", "root_path": "/app", "headers": []}
    request = ASGIRequest({**scope, "client": ("203.0.113.9", 1), "query_string": b""}, BytesIO())
    answer: Any = QuotaMiddleware(apage)(request)
    return asyncio.run(answer)


@pytest.mark.parametrize("ask", [at_script_name, at_forced_script_name, at_root_path])
def test_a_path_is_written_without_the_prefix_of_the_project(
    ask: Callable[[Any], Any], settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_afresh(monkeypatch)
    settings.RATELIMITS = {**settings.RATELIMITS, "PATHS": {"/admin/login/": {"scope": "login"}}}
    rule("few", "fixed_window", scope="login", capacity=1, period=3600, key_kind="ip")
    first, second = ask(settings), ask(settings)
    assert (first.status_code, first.content) == (200, b"/app/admin/login/")
    assert second.status_code == 429
    settings.RATELIMITS = {**settings.RATELIMITS, "PATHS": ["/app/admin/login/"]}
    rule("none", "fixed_window", capacity=0, period=3600)
    assert ask(settings).status_code == 200, "no view has this path below the prefix"


@pytest.mark.parametrize("shorter", ["/", "/admin/"])
def test_the_longest_path_decides_wherever_it_is_written(
    shorter: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_afresh(monkeypatch)
    rule("few", "fixed_window", scope="login", capacity=1, period=3600, key_kind="ip")
    paths = {shorter: {"scope": "all"}, "/admin/login/": {"scope": "login"}}
    settings.RATELIMITS = {**settings.RATELIMITS, "PATHS": paths}
    assert [Client().get("/admin/login/").status_code for _ in range(2)] == [200, 429]
    settings.RATELIMITS = {**settings.RATELIMITS, "PATHS": dict(reversed(paths.items()))}
    assert Client().get("/admin/login/").status_code == 429
    settings.RATELIMITS = {**settings.RATELIMITS, "PATHS": [shorter]}
    assert Client().get("/admin/login/").status_code == 200


def test_what_as_view_is_given_is_what_the_middleware_uses(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_afresh(monkeypatch)
    settings.RATELIMITS = {**settings.RATELIMITS, "PATHS": ["/as-view/"]}
    rule("few", "fixed_window", scope="export", capacity=1, period=3600, key_kind="view_key")
    assert [Client().get(f"/as-view/?team={team}").status_code for team in "aba"] == [200, 200, 429]
    assert list(in_rule("export", "requests", view_key="query:team")) == []
