from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import models
from django.http import HttpRequest
from django.test import RequestFactory

from tests.support.entry_points import begin_afresh


class Team(models.Model):
    """A kind of credential, or an account."""

    class Meta:
        app_label = "tests"
        managed = False

    def __str__(self) -> str:
        return "a team"


class Device(models.Model):
    """Another kind of credential."""

    class Meta:
        app_label = "tests"
        managed = False

    def __str__(self) -> str:
        return "a device"


#: A user that is no row, like the user of a JWT.
def token_user(pk: Any) -> Any:
    return SimpleNamespace(pk=pk, is_authenticated=True)


@pytest.fixture(autouse=True)
def _afresh(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_afresh(monkeypatch)


@pytest.fixture
def hooks(settings: Any) -> Callable[..., None]:
    """Return a function that sets hooks and other settings of RATELIMITS."""

    def set_hooks(**values: Any) -> None:
        settings.RATELIMITS = {**settings.RATELIMITS, "ACCOUNT": None, "DENY_CACHE_SECONDS": 0, **values}

    return set_hooks


def request(user: Any = None, auth: Any = None, address: str = "198.51.100.7", **headers: str) -> HttpRequest:
    """Return a request of a user with a credential."""
    made: Any = RequestFactory().get("/", REMOTE_ADDR=address, headers=headers)
    made.user, made.auth = user, auth
    return made  # type: ignore[no-any-return]
