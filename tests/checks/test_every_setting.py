"""Test that `check` names each wrong setting: the views, the admin and the routers read settings before the checks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from ratelimits.checks.settings import check_settings
from ratelimits.conf import DEFAULTS, conf
from tests.support.fresh import Project
from tests.support.own_apps import OWN
from tests.support.servers import TestServers

WRONG: list[Any] = [
    None,
    True,
    -1,
    7.5,
    float("nan"),
    10**5000,
    "",
    "no such thing",
    "no.such.path",
    "..",
    "\ud800",
    "x" * 5000,
    b"bytes",
    object(),
    object,
    ["no such thing"],
    [None],
    [[1]],
    {"no such thing": 7},
    {None: None},
]
#: What reads settings while Django starts, and when `check` loads the URLconf.
SITE = """
import celery
from django.contrib import admin
from django.http import HttpResponse
from django.urls import include, path
from rest_framework.views import APIView

import ratelimits.ninja
import ratelimits.outbound.celery
import ratelimits.usage.tasks
from ratelimits.decorators import limited
from ratelimits.telemetry.views import metrics
from ratelimits.throttling import QuotaThrottle

app = celery.Celery("site", broker="memory://")


class Search(APIView):
    throttle_classes = [QuotaThrottle]
    throttle_key = "header:X-Tenant"


@limited("pages", key="arg:pk", cost=3)
def page(request, pk):
    return HttpResponse()


urlpatterns = [
    path("admin/", admin.site.urls),
    path("usage/", include("ratelimits.usage.api.urls")),
    path("usage/", include("ratelimits.billing.api.urls")),
    path("metrics/", metrics),
    path("search/", Search.as_view()),
    path("pages/<pk>/", page),
]
"""
CONTRIB = [f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "messages", "sessions")]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "ratelimits.middleware.QuotaMiddleware",
]


def site(folder: Path, servers: TestServers, own: Any) -> Project:
    """Return a project with an admin, an API, views of each kind and a router, and with this value of RATELIMITS."""
    project = Project(folder, servers)
    processors = [
        "django.template.context_processors.request",
        "django.contrib.auth.context_processors.auth",
        "django.contrib.messages.context_processors.messages",
    ]
    engine = "django.template.backends.django.DjangoTemplates"
    templates = {"BACKEND": engine, "APP_DIRS": True, "OPTIONS": {"context_processors": processors}}
    project.settings |= {
        "INSTALLED_APPS": [
            *CONTRIB,
            "rest_framework",
            "simple_history",
            *OWN,
            "shop",
        ],
        "MIDDLEWARE": MIDDLEWARE,
        "TEMPLATES": [templates],
        "ROOT_URLCONF": "site_urls",
        "DATABASE_ROUTERS": ["ratelimits.routers.RatelimitsRouter"],
        "RATELIMITS": own,
    }
    project.write("site_urls.py", SITE)
    project.create_database("default")
    return project


@pytest.mark.parametrize("name", DEFAULTS)
def test_any_value_is_valid_or_an_error_of_check(name: str) -> None:
    for value in WRONG:
        with override_settings(RATELIMITS={**settings.RATELIMITS, name: value}):
            errors = [error.id for error in check_settings(None)]
            assert errors in ([], ["ratelimits.E002"]), value
            try:
                getattr(conf, name)
                assert errors == []
            except ImproperlyConfigured:
                assert errors == ["ratelimits.E002"]


@pytest.mark.parametrize("name", DEFAULTS)
def test_check_names_a_wrong_value_and_does_not_break(name: str, tmp_path: Path, servers: TestServers) -> None:
    printed = site(tmp_path, servers, {"CACHE_ALIAS": "ratelimits", name: {"no such thing": 7}}).manage(
        "check", "--database", "default", fails=True
    )
    entry = "['no such thing']" if name in ("PATHS", "UNITS") else ""
    assert f"(ratelimits.E002) RATELIMITS[{name!r}]{entry} is " in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("own", "error"),
    [
        pytest.param(None, "(ratelimits.E002) RATELIMITS is None.", id="None"),
        ("no such thing", "(ratelimits.E002) RATELIMITS is 'no such thing'."),
        ({"DATABASE": "nowhere"}, "(ratelimits.E002) RATELIMITS['DATABASE'] is 'nowhere'."),
        ({"DATABASE": None}, "(ratelimits.E002) RATELIMITS['DATABASE'] is None."),
        ({"CACHE_ALIAS": "nowhere"}, "(ratelimits.E003) The cache 'nowhere', which"),
        pytest.param(
            {"USER": "shop.broken.user"}, "It cannot be imported: ZeroDivisionError: division by zero.", id="broken"
        ),
        ({}, "(ratelimits.E003) The project has no Redis server"),
        (dict.fromkeys(DEFAULTS, "no such thing"), "(ratelimits.E002) RATELIMITS['SHARDS'] is 'no such thing'."),
    ],
)
def test_check_names_the_setting_in_the_whole_project(
    own: Any, error: str, tmp_path: Path, servers: TestServers
) -> None:
    project = site(tmp_path, servers, own)
    project.write("shop/broken.py", "1 / 0\n")
    for command in (["check"], ["check", "--database", "default"], ["migrate"]):
        printed = project.manage(*command, fails=True)
        assert error in printed
        assert "Traceback" not in printed


def test_migrate_makes_no_table_before_it_knows_the_database(tmp_path: Path, servers: TestServers) -> None:
    project = site(tmp_path, servers, {"DATABASE": "nowhere"})
    printed = project.manage("migrate", "--skip-checks", fails=True)
    assert "CommandError: RATELIMITS['DATABASE'] is 'nowhere'." in printed
    assert "Applying" not in printed


def test_other_settings_are_not_the_end_of_check_either(tmp_path: Path, servers: TestServers) -> None:
    project = site(tmp_path, servers, {"CACHE_ALIAS": "ratelimits"})
    project.settings |= {"ROOT_URLCONF": "no_views", "MIDDLEWARE": [*MIDDLEWARE[:3], "no.such.Middleware"]}
    project.settings |= {"REST_FRAMEWORK": None}
    project.settings["INSTALLED_APPS"].remove("rest_framework")
    project.write("no_views.py", "urlpatterns = []\n")
    assert "no issues" in project.manage("check")
