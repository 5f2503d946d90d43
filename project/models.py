from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

from django.conf import settings
from django.db import models

from ratelimits.identity import api_key_of
from ratelimits.models.keys import validate_account

if TYPE_CHECKING:
    from django.contrib.auth.models import User


def digest_of(secret: str) -> str:
    """Return the digest of a secret. Only the digest is stored.

    The secret has 256 random bits, so a digest without salt is safe.
    """
    return hashlib.sha256(secret.encode()).hexdigest()


class ApiKeyManager(models.Manager["ApiKey"]):
    def issue(self, *, name: str, user: User, account: str | None = None) -> tuple[ApiKey, str]:
        """Make an API key. Return the key and its secret. The secret is not stored, so it cannot be shown again."""
        secret = secrets.token_urlsafe(32)
        key = self.create(name=name, user=user, account=account or "", digest=digest_of(secret))
        return key, secret


class ApiKey(models.Model):
    """An API key, with which a client authenticates. Limits and bills use its primary key, never its secret."""

    name = models.CharField(max_length=64)
    digest = models.CharField(max_length=64, unique=True, editable=False)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="api_keys")
    # The account's text, and no foreign key: a row of Account follows its customer when the text is moved to another.
    account = models.CharField(max_length=255, blank=True, validators=[validate_account])
    created_at = models.DateTimeField(auto_now_add=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    objects = ApiKeyManager()

    class Meta:
        verbose_name = "API key"

    def __str__(self) -> str:
        return self.name

    @property
    def limit_key(self) -> str:
        """Return the name of this API key in limits and in the ledger."""
        return str(api_key_of(self))
