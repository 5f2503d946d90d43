from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin
from django.http import HttpRequest

from project.models import ApiKey
from ratelimits.admin.inspected import InspectedAdmin

if TYPE_CHECKING:
    Base = admin.ModelAdmin[ApiKey]
else:
    # `ModelAdmin[ApiKey]` exists only for the type checker. At run time it raises an error.
    Base = admin.ModelAdmin


@admin.register(ApiKey)
class ApiKeyAdmin(InspectedAdmin, Base):
    list_display = ("name", "limit_key", "user", "account", "created_at", "revoked_at")
    refused_column = True
    list_select_related = ("user",)
    search_fields = ("name", "account")
    readonly_fields = ("limit_key", "created_at")

    def inspected(self, row: ApiKey) -> tuple[str, str]:
        """Return the key that limits use for this API key, and the account that pays ("-" if there is none)."""
        return row.limit_key, row.account or "-"

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Return False: `ApiKey.objects.issue` makes keys, because the secret can be shown only once."""
        return False
