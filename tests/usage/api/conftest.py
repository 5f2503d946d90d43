from __future__ import annotations

from collections.abc import Callable

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import Permission
from django.test import Client

from project.models import ApiKey
from ratelimits.models import Account


@pytest.fixture(autouse=True)
def _at_once(fsync_at_once: None) -> None:
    """Have the server fsync at once, so that no test waits for the fence."""


@pytest.fixture
def customer() -> Callable[..., Client]:
    """Return a client with an API key of an account."""

    def make(account: str | None = "acme", **fields: object) -> Client:
        if account is not None and not Account.objects.filter(identifier=account).exists():
            Account.objects.create(identifier=account, **fields)
        user, _created = get_user_model().objects.get_or_create(username=f"user of {account}")
        key, secret = ApiKey.objects.issue(name="web", user=user, account=account)
        client = Client(headers={"Authorization": f"Api-Key {secret}"})
        client.api_key = key  # type: ignore[attr-defined]
        return client

    return make


@pytest.fixture
def staff() -> Client:
    """Return a client of staff who may view ledger lines and reports."""
    client = Client()
    user = get_user_model().objects.create_user(username="staff", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=("view_line", "view_report")))
    client.force_login(user)
    return client
