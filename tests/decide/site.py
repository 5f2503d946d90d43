"""A project without the app in INSTALLED_APPS and without a database. As a program, it prints what it answers as JSON.

    python -m tests.decide.site NAME [SETTINGS]

NAME is a key of `SITES`, and SETTINGS are more settings as JSON. Without them, the project uses the embedded server.
The program fails if the statuses of its answers are not those of `STATUSES`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any

import django
from django.conf import settings
from django.test import AsyncClient, Client
from django.urls import path

_STARTED = [f"django.contrib.{name}" for name in ("admin", "auth", "contenttypes", "sessions", "messages")]
_SESSIONS = "django.contrib.sessions.middleware.SessionMiddleware"
#: A project without apps, which has no users either, and one as `startproject` and Django REST framework make it.
SITES: dict[str, dict[str, Any]] = {
    "no apps": {"INSTALLED_APPS": [], "REST_FRAMEWORK": {"UNAUTHENTICATED_USER": None}},
    "usual apps": {
        "INSTALLED_APPS": [*_STARTED, "rest_framework"],
        "MIDDLEWARE": [_SESSIONS, "django.contrib.auth.middleware.AuthenticationMiddleware"],
        "SESSION_ENGINE": "django.contrib.sessions.backends.signed_cookies",
        "REST_FRAMEWORK": {},
    },
}
#: The statuses that each view answers with, by the name of the answers. Requests of async code come in any order.
STATUSES = {
    "default": [200, 200, 200, 429],
    "together": [200, 200, 429],
    "ada": [200, 200, 429],
    "scoped": [200, 429],
    "free": [200],
    "async": [200, 200, 429, 429, 429],
}


def start(name: str, more: dict[str, Any]) -> None:
    """Set Django up, and make the views. DATABASES is not set: every query would raise an error."""
    chosen = SITES[name]
    framework = {
        "DEFAULT_AUTHENTICATION_CLASSES": ["tests.decide.callers.ByHeader"],
        "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
        "DEFAULT_THROTTLE_CLASSES": ["ratelimits.throttling.AnonRateThrottle"],
        "DEFAULT_THROTTLE_RATES": {"anon": "3/day", "search": "1/day"},
        **chosen["REST_FRAMEWORK"],
        **more.get("REST_FRAMEWORK", {}),
    }
    settings.configure(
        **{
            "ALLOWED_HOSTS": ["testserver"],
            "SECRET_KEY": "a test's",
            "ROOT_URLCONF": __name__,
            "RATELIMITS": {"EMBEDDED": f"server-{os.getpid()}"},
            **chosen,
            **more,
            "REST_FRAMEWORK": framework,
        }
    )
    django.setup()
    from tests.decide import views

    urlpatterns.extend(path(f"{name}/", view.as_view()) for name, view in views.VIEWS.items())


def get(place: str, count: int, who: str = "") -> list[tuple[int, dict[str, str]]]:
    """Send requests, and return the status and the fields about limits of each response."""
    client = Client(raise_request_exception=False)
    return [_shown(client.get(f"/{place}/", headers={"X-User": who})) for _request in range(count)]


def aget(place: str, count: int, who: str = "") -> list[tuple[int, dict[str, str]]]:
    """Do the same with requests that come at the same time in one event loop."""

    async def all_of_them() -> list[Any]:
        client = AsyncClient(raise_request_exception=False)
        return await asyncio.gather(*(client.get(f"/{place}/", headers={"X-User": who}) for _request in range(count)))

    return [_shown(response) for response in asyncio.run(all_of_them())]


def _shown(response: Any) -> tuple[int, dict[str, str]]:
    fields = ("RateLimit", "RateLimit-Policy", "Retry-After", "Cache-Control")
    return response.status_code, {name: response.headers[name] for name in fields if name in response.headers}


def main(name: str, more: str = "{}") -> None:
    """Send requests to each view, and print the answers and the names of all imported modules."""
    start(name, json.loads(more))
    answers = {
        "default": get("default", 4),
        "together": get("together", 3),
        "ada": get("together", 3, "ada"),
        "scoped": get("scoped", 2),
        "free": get("free", 1),
        "async": aget("async", 5, "bob"),
    }
    statuses = {name: sorted(status for status, _fields in given) for name, given in answers.items()}
    assert statuses == STATUSES, statuses
    print(json.dumps({"answers": answers, "modules": sorted(sys.modules)}))


urlpatterns: list[Any] = []

if __name__ == "__main__":
    main(*sys.argv[1:])
