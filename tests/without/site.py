"""A small project without some apps or packages. As a program, it uses everything that is left, and says what it did.

    python -m tests.without.site NAME DATABASE REDIS

NAME is a key of `WITHOUT`, DATABASE is a database's settings as JSON, REDIS the URL of a server. If REDIS is empty, the
project uses the embedded server. The program fails if a package that NAME leaves out can be imported: hide it before
(`HIDE` does so), or do not install it (the sessions `without` of `nox` do so).
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import sys
from typing import Any, NamedTuple

import django
from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import include, path

_CONTRIB = ("auth", "contenttypes", "sessions", "messages", "staticfiles", "admin")
#: The admin needs most apps of Django.
_ADMIN = ("admin", "messages", "sessions")
#: The apps of the package, the lowest first.
_OWN = ("ratelimits", "ratelimits.usage", "ratelimits.billing")


class Without(NamedTuple):
    """What a project does not have: apps of INSTALLED_APPS, and packages that are not installed."""

    apps: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()


WITHOUT = {
    "nothing": Without(),
    "admin": Without(("admin",)),
    "sessions and messages": Without(_ADMIN),
    "staticfiles": Without(("staticfiles",)),
    "history in the apps": Without(("admin", "simple_history")),
    "auth": Without((*_ADMIN, "auth", "contenttypes")),
    "drf": Without(("rest_framework",), ("rest_framework",)),
    "celery": Without((), ("celery", "kombu")),
    "billing": Without(("ratelimits.billing",)),
    "usage": Without(_OWN[1:]),
    "usage and the admin": Without((*_ADMIN, "simple_history", *_OWN[1:])),
    "everything": Without(
        (*_ADMIN, "auth", "contenttypes", "staticfiles", "simple_history", "rest_framework"),
        ("rest_framework", "celery", "kombu"),
    ),
}
#: The modules that import a package themselves.
MODULES_WITH = {
    "admin": ("ratelimits.admin", "ratelimits.usage.admin", "ratelimits.billing.admin"),
    "rest_framework": ("ratelimits.usage.api", "ratelimits.billing.api", "ratelimits.throttling"),
    "celery": ("ratelimits.usage.tasks", "ratelimits.billing.tasks", "ratelimits.outbound.celery"),
    "drf_spectacular": ("ratelimits.usage.api.schema", "ratelimits.billing.api.schema"),
    "ninja": ("ratelimits.ninja",),
    "prometheus_client": ("ratelimits.telemetry.prometheus", "ratelimits.telemetry.views"),
    "opentelemetry": ("ratelimits.telemetry.opentelemetry",),
    "pytest": ("ratelimits.pytest_plugin",),
    **{name: (name,) for name in _OWN},
}
#: Python's own start runs a file with this text, called sitecustomize.py: then these packages cannot be imported.
HIDE = """\
import sys

HIDDEN = {packages!r}
for name in list(sys.modules):
    if name.partition(".")[0] in (*HIDDEN, "ratelimits"):
        del sys.modules[name]


class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Hide())
"""


def page(request: HttpRequest) -> HttpResponse:
    """Show a page that is not the admin's: Django then loads the tags of all apps."""
    return render(request, "page.html", {"place": request.path})


def _settings(without: Without, database: dict[str, Any], server: str) -> dict[str, Any]:
    has = {name: name not in without.apps for name in (*_CONTRIB, "simple_history", "rest_framework")}
    apps = [f"django.contrib.{name}" for name in _CONTRIB if has[name]]
    middleware = {
        "sessions": "django.contrib.sessions.middleware.SessionMiddleware",
        "auth": "django.contrib.auth.middleware.AuthenticationMiddleware",
        "messages": "django.contrib.messages.middleware.MessageMiddleware",
    }
    has_user = has["auth"] and has["sessions"]
    used = {"sessions": has["sessions"], "auth": has_user, "messages": has["messages"]}
    processors = ["django.template.context_processors.request"]
    processors += ["django.contrib.auth.context_processors.auth"] if has_user else []
    processors += ["django.contrib.messages.context_processors.messages"] if has["messages"] else []
    loaders = [
        ("django.template.loaders.locmem.Loader", {"page.html": "<h1>{{ place }}</h1>"}),
        "django.template.loaders.app_directories.Loader",
    ]
    engine = "django.template.backends.django.DjangoTemplates"
    redis = {"BACKEND": "django_redis.cache.RedisCache", "LOCATION": server}
    fence = {} if "ratelimits.usage" in without.apps else {"FENCE": "none"}
    own = {} if server else {"EMBEDDED": "server"}
    return {
        "DEBUG": False,
        "ALLOWED_HOSTS": ["testserver"],
        "SECRET_KEY": "a test's",
        "USE_TZ": True,
        "DEFAULT_AUTO_FIELD": "django.db.models.BigAutoField",
        "ROOT_URLCONF": __name__,
        "STATIC_URL": "static/",
        "AUTH_USER_MODEL": "auth.User" if has["auth"] else "people.Person",
        "INSTALLED_APPS": [
            *apps,
            *(name for name in ("rest_framework", "simple_history") if has[name]),
            *(name for name in _OWN if name not in without.apps),
            *([] if has["auth"] else ["tests.without.people"]),
        ],
        "MIDDLEWARE": [
            *(place for name, place in middleware.items() if used[name]),
            "ratelimits.middleware.QuotaMiddleware",
        ],
        "TEMPLATES": [{"BACKEND": engine, "OPTIONS": {"context_processors": processors, "loaders": loaders}}],
        "DATABASES": {"default": database},
        "CACHES": {"default": redis if server else {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}},
        "RATELIMITS": {"NAMESPACE": "without", "PATHS": ["/files/"], "NUM_PROXIES": 0, **fence, **own},
        "REST_FRAMEWORK": {
            "DEFAULT_THROTTLE_CLASSES": ["ratelimits.throttling.QuotaThrottle"],
            **({} if has["auth"] else {"DEFAULT_AUTHENTICATION_CLASSES": [], "UNAUTHENTICATED_USER": None}),
        },
    }


def _urls(without: Without) -> list[Any]:
    urls: list[Any] = [path("files/", page), path("free/", page)]
    if "rest_framework" not in without.apps:
        from rest_framework.response import Response
        from rest_framework.views import APIView

        class Hello(APIView):
            def get(self, request: Any) -> Any:
                return Response({"hello": "world"})

        urls.append(path("api/", Hello.as_view()))
        if "auth" not in without.apps:
            apps = [name for name in _OWN[1:] if name not in without.apps]
            urls += [path("quota/", include(f"{name}.api.urls")) for name in apps]
    if "admin" not in without.apps:
        from django.contrib import admin

        urls.append(path("admin/", admin.site.urls))
    return urls


def _imported(without: Without) -> str:
    """Import every module of the app but those that import what the project does not have. Return their number."""
    import ratelimits

    optional = ("drf_spectacular", "ninja", "prometheus_client", "opentelemetry", "pytest")
    missing = [*without.apps, *without.packages, *(name for name in optional if not _can_import(name))]
    left_out = tuple(module for name in missing for module in MODULES_WITH.get(name, ()))

    def walk(folder: list[str], prefix: str) -> int:
        count = 0
        for module in pkgutil.iter_modules(folder, prefix):
            if not f"{module.name}.".startswith(tuple(f"{name}." for name in left_out)):
                inner = importlib.import_module(module.name)
                count += 1 + (walk(list(inner.__path__), f"{module.name}.") if module.ispkg else 0)
        return count

    return f"imported {walk(list(ratelimits.__path__), 'ratelimits.')}"


def _can_import(package: str) -> bool:
    try:
        importlib.import_module(package)
    except ModuleNotFoundError:
        return False
    return True


def main(name: str, database: str, server: str) -> None:
    """Use a project without what `name` says."""
    without = WITHOUT[name]
    assert not any(map(_can_import, without.packages)), "a package can be imported"
    settings.configure(**_settings(without, json.loads(database), server))
    django.setup()

    from django.core.management import call_command, get_commands
    from django.db import connection
    from django.test import Client

    from ratelimits.models import Rule

    urlpatterns.extend(_urls(without))
    call_command("check")
    call_command("migrate", verbosity=0)
    call_command("makemigrations", check_changes=True, dry_run=True)
    print("tables of", *sorted({_app_of(table) for table in connection.introspection.table_names()} - {""}))
    call_command("check", databases=["default"])
    Rule.objects.create(name="few", key_kind="ip", algorithm="fixed_window", capacity=2, period=3600)
    client = Client()
    for place in ("files", "api"):
        if place == "files" or "rest_framework" not in without.apps:
            address = f"192.0.2.{len(place)}"
            print(place, *(client.get(f"/{place}/", REMOTE_ADDR=address).status_code for _ in range(3)))
    free = client.get("/free/")
    print("free", free.status_code, free.content.decode(), client.get("/nothing/").status_code)
    for app, command in (
        ("ratelimits", ["ratelimits_import"]),
        ("ratelimits", ["ratelimits_rules", "dump"]),
        ("ratelimits", ["ratelimits_key", "show", "ip:192.0.2.5"]),
        ("ratelimits", ["ratelimits_doctor"]),
        ("ratelimits", ["ratelimits_reload"]),
        ("ratelimits.usage", ["ratelimits_seal"]),
        ("ratelimits.usage", ["ratelimits_drain"]),
        ("ratelimits.billing", ["ratelimits_finalise"]),
        ("ratelimits.billing", ["ratelimits_verify"]),
    ):
        if app not in without.apps:
            call_command(*command)
    print("commands of", *sorted({app for app in get_commands().values() if app.startswith("ratelimits")}))
    print(_imported(without))
    if "admin" not in without.apps:
        _use_admin(client)


def _app_of(table: str) -> str:
    """Return which app of the package has a table; "" if none has it."""
    labels = [name.replace(".", "_") for name in _OWN if table.startswith(f"{name.replace('.', '_')}_")]
    return max(labels, key=len, default="")


def _use_admin(client: Any) -> None:
    """Open each page that needs no row, and those of a rule."""
    from django.contrib import admin
    from django.contrib.auth import get_user_model

    from ratelimits.models import Rule

    users: Any = get_user_model()._default_manager
    client.force_login(users.create_superuser("ann", "ann@example.com", "a password"))
    rule = f"/admin/ratelimits/rule/{Rule.objects.get().pk}"
    for model in admin.site._registry:
        if model._meta.app_label.startswith("ratelimits"):
            start = f"/admin/{model._meta.app_label}/{model._meta.model_name}/"
            assert client.get(start).status_code == 200, start
            assert client.get(f"{start}add/").status_code in (200, 302, 403, 404), start
    assert client.get("/admin/ratelimits/inspect/?q=ip:192.0.2.5").status_code == 200
    pages = [client.get(place) for place in ("/admin/", f"{rule}/change/", f"{rule}/history/")]
    print("admin", *(shown.status_code for shown in pages), "ratelimits-level" in pages[0].content.decode())


urlpatterns: list[Any] = []

if __name__ == "__main__":
    main(*sys.argv[1:])
