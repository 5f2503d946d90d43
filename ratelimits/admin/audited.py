"""Admin pages whose every change says who made it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.http import HttpRequest, HttpResponse
from simple_history.admin import SimpleHistoryAdmin
from simple_history.models import HistoricalRecords

if TYPE_CHECKING:
    from django.contrib.admin import ModelAdmin

    _Base = ModelAdmin[Any]
else:
    _Base = SimpleHistoryAdmin


@contextmanager
def _by(request: HttpRequest) -> Iterator[None]:
    """Name the request's user in the history, whether or not django-simple-history's middleware is installed."""
    context = HistoricalRecords.context
    if hasattr(context, "request"):
        yield
        return
    context.request = request
    try:
        yield
    finally:
        del context.request


class AuditedAdmin(_Base):
    """Changes, inlines, deletions and actions all go into the history with their user and version."""

    history_list_display = ["version"]

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        with _by(request):
            return super().changeform_view(request, object_id, form_url, extra_context)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        with _by(request):
            return super().changelist_view(request, extra_context)

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        with _by(request):
            return super().delete_view(request, object_id, extra_context)
