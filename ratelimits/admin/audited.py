"""Admin pages whose every change says who made it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.contrib import messages
from django.contrib.admin.helpers import AdminForm
from django.contrib.admin.utils import flatten_fieldsets, unquote
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import router, transaction
from django.http import Http404, HttpRequest, HttpResponse
from simple_history.admin import SimpleHistoryAdmin
from simple_history.models import HistoricalRecords

from ratelimits import unknown_names
from ratelimits.admin.typed import TypedNumbers
from ratelimits.models.versions import editing

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


class AuditedAdmin(TypedNumbers, _Base):
    """Changes, inlines, deletions, actions and reverts all go into the history with their user and version."""

    history_list_display = ["version"]

    @contextmanager
    def _edit(self, request: HttpRequest) -> Iterator[None]:
        """One edit for all that a POST validates and writes: nobody else's edit comes between the two."""
        with _by(request):
            if request.method != "POST":
                yield
                return
            with editing(router.db_for_write(self.model)):
                yield

    def _saved(self, request: HttpRequest, response: HttpResponse) -> HttpResponse:
        """Return the response; take the edit back if it is the form again, with what is wrong in it."""
        if request.method == "POST" and response.status_code == 200:
            transaction.set_rollback(True, using=router.db_for_write(self.model))
        return response

    def changeform_view(
        self,
        request: HttpRequest,
        object_id: str | None = None,
        form_url: str = "",
        extra_context: dict[str, Any] | None = None,
    ) -> HttpResponse:
        with self._edit(request):
            return self._saved(request, super().changeform_view(request, object_id, form_url, extra_context))

    def response_add(self, request: HttpRequest, obj: Any, post_url_continue: str | None = None) -> HttpResponse:
        self._warn(request, obj)
        return super().response_add(request, obj, post_url_continue)

    def response_change(self, request: HttpRequest, obj: Any) -> HttpResponse:
        self._warn(request, obj)
        return super().response_change(request, obj)

    def _warn(self, request: HttpRequest, row: Any) -> None:
        """Say of a row that was saved which of its names nothing has."""
        for sentence in unknown_names.in_row(row):
            self.message_user(request, sentence, messages.WARNING)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        with _by(request):
            return super().changelist_view(request, extra_context)

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        with _by(request):
            return super().delete_view(request, object_id, extra_context)

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        self._primary_key(unquote(object_id))
        return super().history_view(request, object_id, extra_context)

    def get_history_queryset(self, request: HttpRequest, history_manager: Any, pk_name: str, object_id: Any) -> Any:
        """Read the users by a query of their own: they may be in another database."""
        records: Any = super().get_history_queryset(request, history_manager, pk_name, object_id)  # type: ignore[misc]
        return records.select_related(None)._select_related_history_tracked_objs().prefetch_related("history_user")

    def history_form_view(
        self, request: HttpRequest, object_id: str, version_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the row as it was; a POST brings it back, as an edit like others.

        Raises PermissionDenied for a POST by those who may only look: django-simple-history lets them save.
        """
        pk = self._primary_key(unquote(object_id))
        if not version_id.isdecimal():
            raise Http404
        with self._edit(request):
            if request.method == "POST" and self.revert_disabled(request, self.model(pk=pk)):
                raise PermissionDenied
            response = super().history_form_view(request, pk, version_id, extra_context)  # type: ignore[misc]
            return self._saved(request, response)

    def revert_disabled(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return whether the user may only look: reverting is changing, and of a deleted row it is adding."""
        if super().revert_disabled(request, obj) or not self.has_change_permission(request, obj):  # type: ignore[misc]
            return True
        there = obj is None or self.model._base_manager.filter(pk=obj.pk).exists()
        return not (there or self.has_add_permission(request))

    def render_history_view(
        self, request: HttpRequest, template: str, context: dict[str, Any], **kwargs: Any
    ) -> HttpResponse:
        """Show a former state as text, not as a form, to those who may not bring it back."""
        form = context.get("adminform")
        if form is not None and context["revert_disabled"]:
            fieldsets: Any = self.get_fieldsets(request, context["original"])
            shown = flatten_fieldsets(fieldsets)
            context["adminform"] = AdminForm(form.form, fieldsets, {}, shown, model_admin=self)
        response: HttpResponse = super().render_history_view(request, template, context, **kwargs)  # type: ignore[misc]
        return response

    def _primary_key(self, text: str) -> Any:
        """Return the primary key that an address names; Http404 for a text that can be none."""
        try:
            return self.model._meta.pk.to_python(text)
        except ValidationError as error:
            raise Http404 from error
