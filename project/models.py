from __future__ import annotations

import hashlib
import secrets
from typing import TYPE_CHECKING

from django.conf import settings
from django.db import models

if TYPE_CHECKING:
    from django.contrib.auth.models import User


def digest_of(secret: str) -> str:
    """What is kept of a secret. It has 256 random bits, so a plain digest cannot be guessed back."""
    return hashlib.sha256(secret.encode()).hexdigest()


class ApiKeyManager(models.Manager["ApiKey"]):
    def issue(self, *, name: str, user: User, account: str | None = None) -> tuple[ApiKey, str]:
        """A new key and its secret, which is shown this once and kept nowhere."""
        secret = secrets.token_urlsafe(32)
        key = self.create(name=name, user=user, account_id=account, digest=digest_of(secret))
        return key, secret


class ApiKey(models.Model):
    """A client's credential; its primary key, never its secret, is what limits and bills know it by."""

    name = models.CharField(max_length=64)
    digest = models.CharField(max_length=64, unique=True, editable=False)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="api_keys")
    # By its identifier, so that a request learns its account without another query.
    account = models.ForeignKey(
        "ratelimits.Account",
        to_field="identifier",
        on_delete=models.PROTECT,
        null=True,
        blank=True,
        related_name="+",
    )
    created_at = models.DateTimeField(auto_now_add=True)
    revoked_at = models.DateTimeField(null=True, blank=True)

    objects = ApiKeyManager()

    class Meta:
        verbose_name = "API key"

    def __str__(self) -> str:
        return self.name

    @property
    def limit_key(self) -> str:
        """How limits and the ledger name it."""
        return f"api_key:{self.pk}"
