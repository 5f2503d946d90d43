from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core import checks
from django.test import override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from rest_framework.authentication import SessionAuthentication, TokenAuthentication
from rest_framework.decorators import api_view, authentication_classes
from rest_framework.response import Response
from rest_framework.views import APIView
from rest_framework_simplejwt.authentication import JWTAuthentication

from ratelimits.decorators import limited
from tests.support.fresh import Project
from tests.support.own_apps import OWN
from tests.support.servers import TestServers

PACKAGES = {
    "oauth2_provider.contrib.rest_framework.OAuth2Authentication": "django-oauth-toolkit",
    "rest_framework_simplejwt.authentication.JWTAuthentication": "djangorestframework-simplejwt",
    "knox.auth.TokenAuthentication": "django-rest-knox",
    "allauth.headless.contrib.rest_framework.authentication.JWTTokenAuthentication": "django-allauth",
    "allauth.idp.oidc.contrib.rest_framework.authentication.TokenAuthentication": "django-allauth",
}


def messages(*views: Any, **changes: Any) -> list[checks.CheckMessage]:
    """Return the messages about a project with these views alone."""
    module = types.ModuleType("urls_of_credentials")
    module.urlpatterns = [path("view/", view) for view in views]  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    with override_settings(ROOT_URLCONF=module.__name__, **changes):
        return checks.run_checks(tags=["ratelimits"], databases=[])


def project_of(*classes: str) -> dict[str, Any]:
    return {"REST_FRAMEWORK": {**settings.REST_FRAMEWORK, "DEFAULT_AUTHENTICATION_CLASSES": classes}}


def with_hook(value: Any) -> dict[str, Any]:
    return {"RATELIMITS": {**settings.RATELIMITS, "API_KEY": value}}


@pytest.mark.parametrize(("cls", "package"), PACKAGES.items())
def test_short_lived_tokens_need_the_hook(cls: str, package: str) -> None:
    (warning,) = messages(**project_of("rest_framework.authentication.SessionAuthentication", cls))
    assert warning.id == "ratelimits.W006"
    assert package in warning.msg
    assert "RATELIMITS['API_KEY']" in str(warning.hint)
    assert "docs/requests/who.md" in str(warning.hint)
    assert messages(**project_of(cls), **with_hook("project.authentication.account_of")) == []


def test_a_wrong_hook_is_reported_once() -> None:
    (error,) = messages(**project_of(next(iter(PACKAGES))), **with_hook("no.such.module"))
    assert error.id == "ratelimits.E002"


@pytest.mark.parametrize("framework", [{}, {"DEFAULT_AUTHENTICATION_CLASSES": None}])
def test_a_project_without_classes_needs_nothing(framework: dict[str, Any]) -> None:
    assert messages(REST_FRAMEWORK=framework) == []


def test_tokens_that_stay_need_nothing() -> None:
    assert messages(**project_of("rest_framework.authentication.TokenAuthentication", "knoxville.Authentication")) == []


class OwnAuthentication(JWTAuthentication):
    """A class of the project, whose base class is the package's."""


class Mine(APIView):
    authentication_classes = [OwnAuthentication]


class Tokens(APIView):
    authentication_classes = [TokenAuthentication]

    @method_decorator(limited("handled"))
    def get(self, request: Any) -> Response:
        return Response()


@method_decorator(limited("dispatched"), name="dispatch")
class Dispatched(Tokens):
    pass


@method_decorator(limited("sessions"), name="dispatch")
class Sessions(APIView):
    authentication_classes = [SessionAuthentication]


@limited("above")
@api_view(["GET"])
@authentication_classes([TokenAuthentication])
def above(request: Any) -> Response:
    return Response()


@api_view(["GET"])
@authentication_classes([TokenAuthentication])
@limited("below")
def below(request: Any) -> Response:
    return Response()


@method_decorator(limited("plain"), name="dispatch")
class Plain(View):
    pass


EARLY = [above, Dispatched.as_view(), limited("around")(Tokens.as_view())]


def test_a_decorator_that_does_not_know_who_asks_is_named() -> None:
    (warning,) = messages(*EARLY, below, Tokens.as_view(), Sessions.as_view(), Plain.as_view())
    assert warning.id == "ratelimits.W013"
    names = ", ".join(f"{__name__}.{name}" for name in ("Dispatched", "Tokens", "above"))
    assert warning.msg.endswith(f"has no user and no API key: {names}.")
    assert "below @api_view" in str(warning.hint)


def test_a_view_with_a_class_of_its_own_is_found() -> None:
    (warning,) = messages(Mine.as_view())
    assert warning.id == "ratelimits.W006"


#: Prints the messages of a project without hooks, and those of this project with a hook.
CHECK = """
from django.conf import settings
from django.core import checks
from django.test import override_settings

for hook in (None, "shop.callers.key_of"):
    with override_settings(RATELIMITS={**settings.RATELIMITS, "API_KEY": hook}):
        for message in checks.run_checks(tags=["ratelimits"], databases=[]):
            print(hook, message.id, message.msg)
"""


def test_installed_apps_show_what_is_used(tmp_path: Path, servers: TestServers) -> None:
    """Use a project of its own, because the admin would keep what these apps register."""
    project = Project(tmp_path, servers)
    contrib = [f"django.contrib.{name}" for name in ("auth", "contenttypes")]
    packages = ["knox", "rest_framework_api_key", "rest_framework_simplejwt.token_blacklist"]
    project.settings["INSTALLED_APPS"] = [
        *contrib,
        "rest_framework",
        *packages,
        "simple_history",
        *OWN,
    ]
    project.write("shop/callers.py", "def key_of(request):\n    return None\n")
    first, second = project.python(CHECK).splitlines()
    assert first.startswith("None ratelimits.W006 The project uses djangorestframework-simplejwt and django-rest-knox.")
    assert second.startswith("None ratelimits.W007 The project uses djangorestframework-api-key,")
