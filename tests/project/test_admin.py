"""Test the list of API keys in the admin: the column of refused requests, which a project may have for its own keys."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from project.models import ApiKey
from ratelimits.models import Account
from ratelimits.usage.models import KeyTotal
from ratelimits.usage.models.totals import HOUR

pytestmark = pytest.mark.django_db

URL = reverse("admin:project_apikey_changelist")


def refused(key: ApiKey, denied: int) -> None:
    start = int(time.time()) // HOUR * HOUR
    KeyTotal.objects.create(
        span=HOUR, start=start, account=key.account, key=key.limit_key, rule=1, meter="requests",
        admitted_requests=0, denied_requests=denied, shadow_requests=0,
    )  # fmt: skip


def column(client: Client) -> list[str]:
    page = client.get(URL).content.decode()
    return re.findall(r'<td class="field-refused[^"]*">([^<]*)</td>', page)


def test_it_shows_refused_requests_by_one_more_query(admin_client: Client, client: Client) -> None:
    user: Any = User.objects.get()
    Account.objects.create(identifier="acme")

    def issue(name: str, account: str | None = "acme") -> ApiKey:
        return ApiKey.objects.issue(name=name, user=user, account=account)[0]

    refused(issue("web"), 1_234)
    refused(issue("own", None), 5)
    assert sorted(column(admin_client)) == ["1,234", "–"], "without an account, those of one key are not known"
    with CaptureQueriesContext(connection) as few:
        column(admin_client)
    for number in range(20):
        refused(issue(f"web {number}"), number)
    with CaptureQueriesContext(connection) as many:
        assert len(column(admin_client)) == 22
    assert len(many) == len(few)
    viewer = User.objects.create(username="viewer", is_staff=True)
    viewer.user_permissions.set(Permission.objects.filter(codename__in=["view_apikey"]))
    client.force_login(viewer)
    assert column(client) == []
    viewer.user_permissions.add(Permission.objects.get(codename="view_line"))
    assert "19" in column(client)
