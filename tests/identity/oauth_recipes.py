"""Do what docs/requests/who.md says about django-oauth-toolkit. test_who.py runs this file in a project of its own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.urls import path
from django.utils import timezone
from oauth2_provider.contrib.rest_framework import OAuth2Authentication
from oauth2_provider.models import AccessToken, Application

from ratelimits.identity import Identity
from tests.identity.asking import Who, ask, recipe, statuses

pytestmark = [pytest.mark.django_db, pytest.mark.urls(__name__)]

urlpatterns = [path("oauth/", Who.as_view(authentication_classes=[OAuth2Authentication]))]


def tokens(application: Any, user: User | None) -> list[str]:
    """Return the headers of three access tokens."""
    expires = timezone.now() + timedelta(hours=1)
    names = [f"{'nobody' if user is None else user}-{number}" for number in range(3)]
    for name in names:
        AccessToken.objects.create(application=application, user=user, token=name, expires=expires, scope="read")
    return [f"Bearer {name}" for name in names]


def test_each_token_of_an_application_is_one_api_key(django_assert_num_queries: Any) -> None:
    ada = User.objects.create_user("ada")
    application = Application.objects.create(
        name="scanner", client_type="confidential", authorization_grant_type="client-credentials"
    )
    of_ada, of_nobody = tokens(application, ada), tokens(application, None)
    first, second = ask("/oauth/", of_nobody[0]), ask("/oauth/", of_nobody[1])
    assert first.account == f"account:{first.api_key}" != second.account
    for kind in ("api_key", "caller", "account"):
        assert statuses("/oauth/", *of_nobody, kind=kind) == [200, 200, 200]
    assert statuses("/oauth/", *of_ada, kind="caller") == [200, 200, 429]
    with django_assert_num_queries(1):
        ask("/oauth/", of_ada[0])
    with recipe("django-oauth-toolkit"):
        key, address = f"api_key:oauth2_provider.application:{application.pk}", "ip:127.0.0.1"
        expected = Identity(None, key, f"account:{key}", address)
        assert ask("/oauth/", of_nobody[0]) == expected
        with django_assert_num_queries(1):
            asked = ask("/oauth/", of_ada[0])
        assert asked == expected._replace(user=f"user:{ada.pk}", account=f"account:{ada.pk}")
        for kind in ("api_key", "caller", "account"):
            assert statuses("/oauth/", *of_nobody, kind=kind) == [200, 200, 429]
        assert statuses("/oauth/", of_ada[0], *of_nobody[:2], kind="api_key") == [200, 200, 429]
