from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db.models import Q
from django.http import HttpRequest
from drf_spectacular.extensions import OpenApiAuthenticationExtension
from rest_framework.authentication import BaseAuthentication, get_authorization_header
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from project.models import ApiKey, digest_of

SCHEME = "Api-Key"


class ApiKeyAuthentication(BaseAuthentication):
    """Authenticate a request by the header `Authorization: Api-Key <secret>`.

    `request.auth` is then the API key, and `request.user` is the key's owner.
    """

    def authenticate(self, request: Request) -> tuple[Any, ApiKey] | None:
        scheme, _, secret = get_authorization_header(request).decode("latin-1").partition(" ")
        if scheme.lower() != SCHEME.lower():
            return None
        try:
            key = ApiKey.objects.select_related("user").get(
                digest=digest_of(secret.strip()), revoked_at=None, user__is_active=True
            )
        except ApiKey.DoesNotExist:
            raise AuthenticationFailed("This API key is unknown or revoked.") from None
        return key.user, key

    def authenticate_header(self, request: Request) -> str:
        return SCHEME


def account_of(request: HttpRequest | Request) -> str | None:
    """Return the account that pays for the request: the account of its API key. Return None without an API key."""
    auth = getattr(request, "auth", None)
    return auth.account or None if isinstance(auth, ApiKey) else None


def find_keys(text: str) -> Iterator[tuple[str, str]]:
    """Yield API keys whose name contains the text or whose id is the text, each as its limit key and its name.

    Yield at most 51 keys: the inspector lists 50, and the 51st tells the inspector that there are more.
    """
    # A longer number would be too large for an id in the database.
    found = Q(name__icontains=text) | (Q(pk=int(text)) if text.isdecimal() and len(text) < 19 else Q())
    for key in ApiKey.objects.filter(found).order_by("name")[:51]:
        yield key.limit_key, key.name


class ApiKeyScheme(OpenApiAuthenticationExtension):  # type: ignore[no-untyped-call]
    target_class = ApiKeyAuthentication
    name = "ApiKey"

    def get_security_definition(self, auto_schema: object) -> dict[str, str]:
        return {"type": "apiKey", "in": "header", "name": "Authorization", "description": f"{SCHEME} <secret>"}
