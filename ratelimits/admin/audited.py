"""Admin pages that record every change, with the user who made the change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.helpers import ActionForm, AdminForm
from django.contrib.admin.utils import flatten_fieldsets, unquote
from django.core.exceptions import PermissionDenied
from django.db import router, transaction
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.translation import gettext_lazy as _
from simple_history.admin import SimpleHistoryAdmin
from simple_history.models import HistoricalRecords

from ratelimits import moments, unknown_names
from ratelimits.admin.typed import ChecksIds, LocalMoments, TypedNumbers, primary_key
from ratelimits.models.history import MAX_REASON, MOVED, because
from ratelimits.models.versions import editing

if TYPE_CHECKING:
    from django.contrib.admin import ModelAdmin

    _Base = ModelAdmin[Any]
else:
    _Base = SimpleHistoryAdmin


#: Name of the input for the reason of a change. The form of each audited page has this input.
REASON = "change_reason"
BEFORE_MOVE = _(
    "This state is from before a move of an account text, so it is perhaps about another customer, and cannot be"
    " restored. To give the text back, move it."
)


class ReasonField(forms.CharField):
    """An input for the reason of a change. If only the reason was typed, the row counts as not changed."""

    def has_changed(self, initial: Any, data: Any) -> bool:
        return False


def reason_field() -> ReasonField:
    """Return the input for the reason of a change."""
    return ReasonField(
        label=_("Why this change"),
        required=False,
        max_length=MAX_REASON,
        help_text=_("The history shows this text. Write for example the number of a ticket."),
        widget=forms.TextInput({"class": "vTextField"}),
    )


class ReasonedActionForm(ActionForm):
    """The form of a list's actions, with an input for the reason."""

    change_reason = forms.CharField(label=_("Why:"), required=False, max_length=MAX_REASON)


class ReasonForm(forms.Form):
    """A form with only one input: the reason of a change."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields[REASON] = reason_field()


@contextmanager
def recorded_user(request: HttpRequest) -> Iterator[None]:
    """Record the user and the reason of the request in the history, for all changes in the `with` block.

    This also works if django-simple-history's middleware is not installed.
    """
    context = HistoricalRecords.context
    with because(request.POST.get(REASON)):
        if hasattr(context, "request"):
            yield
            return
        context.request = request
        try:
            yield
        finally:
            del context.request


class AuditedAdmin(TypedNumbers, LocalMoments, ChecksIds, _Base):
    """An admin page that records the user, the reason and the version of every change by a form or an action."""

    history_list_display = ["version"]
    object_history_template = "ratelimits/admin/history.html"
    action_form = ReasonedActionForm
    delete_confirmation_template = "ratelimits/admin/delete_confirmation.html"
    delete_selected_confirmation_template = "ratelimits/admin/delete_selected_confirmation.html"

    class Media:
        css = {"all": ["ratelimits/lists.css"]}

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        """Return the form. Add an input for the reason, because the reason is not a column of the row's table."""
        form_with_reason = type(
            self.form.__name__, (self.form,), {REASON: reason_field(), "__module__": self.form.__module__}
        )
        return super().get_form(request, obj, change, **{"form": form_with_reason, **kwargs})

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the fieldsets. If the user may save the form, the input for the reason comes last."""
        fieldsets = [*super().get_fieldsets(request, obj)]
        may_save = self.has_change_permission(request, obj) if obj else self.has_add_permission(request)
        names = flatten_fieldsets(fieldsets)
        return [*fieldsets, (None, {"fields": [REASON]})] if may_save and REASON not in names else fieldsets

    @contextmanager
    def _edit(self, request: HttpRequest) -> Iterator[None]:
        """Validate and write all rows of a POST in one edit, so that no other edit happens at the same time."""
        with recorded_user(request):
            if request.method != "POST":
                yield
                return
            with editing(router.db_for_write(self.model)):
                yield

    def _checked_response(self, request: HttpRequest, response: HttpResponse) -> HttpResponse:
        """Return the response. If the response shows the form again with errors, roll the edit back.

        A response to a successful POST redirects, so its status is not 200.
        """
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
            return self._checked_response(request, super().changeform_view(request, object_id, form_url, extra_context))

    def response_add(self, request: HttpRequest, obj: Any, post_url_continue: str | None = None) -> HttpResponse:
        self._warn(request, obj)
        return super().response_add(request, obj, post_url_continue)

    def response_change(self, request: HttpRequest, obj: Any) -> HttpResponse:
        self._warn(request, obj)
        return super().response_change(request, obj)

    def _warn(self, request: HttpRequest, row: Any) -> None:
        """Show a warning for each name in a saved row that the project does not know, such as an unknown scope."""
        for sentence in unknown_names.in_row(row):
            self.message_user(request, sentence, messages.WARNING)

    def effect_of(self, request: HttpRequest, row: Any) -> tuple[list[str], list[str]]:
        """Return sentences and warnings about the effect that an unsaved row would have.

        The page that undoes a change shows these sentences and warnings.
        """
        return [], []

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        with recorded_user(request):
            return super().changelist_view(request, extra_context)

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        with recorded_user(request):
            return super().delete_view(request, object_id, extra_context)

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        primary_key(self.model, unquote(object_id))  # Raise Http404 if the id cannot be a primary key.
        return super().history_view(request, object_id, extra_context)

    def get_history_queryset(self, request: HttpRequest, history_manager: Any, pk_name: str, object_id: Any) -> Any:
        """Return the history with its users. A separate query reads the users: users may be in another database."""
        records: Any = super().get_history_queryset(request, history_manager, pk_name, object_id)  # type: ignore[misc]
        return records.select_related(None)._select_related_history_tracked_objs().prefetch_related("history_user")

    def history_form_view(
        self, request: HttpRequest, object_id: str, version_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show a former state of the row. A POST restores that state as a new edit.

        A state from before a move of an account text cannot be restored: the row is perhaps about another customer now.
        Raise PermissionDenied for a POST of a user who may only view the row: without this check, django-simple-history
        would save the row.
        """
        pk = primary_key(self.model, unquote(object_id))
        primary_key(self.model.history.model, version_id)
        with self._edit(request):
            if request.method == "POST" and self.revert_disabled(request, self.model(pk=pk)):
                raise PermissionDenied
            if self.is_before_move(pk, version_id):
                messages.warning(request, BEFORE_MOVE)
                if request.method == "POST":
                    transaction.set_rollback(True, using=router.db_for_write(self.model))
                    name = f"{self.admin_site.name}:{self.model._meta.app_label}_{self.model._meta.model_name}_history"
                    return HttpResponseRedirect(reverse(name, args=[pk]))
            response = super().history_form_view(request, pk, version_id, extra_context)  # type: ignore[misc]
            return self._checked_response(request, response)

    def is_before_move(self, pk: Any, history_id: Any) -> bool:
        """Return whether a record of a row's history is older than the newest that came with a move of a text."""
        records: Any = self.model.history
        return bool(records.filter(id=pk, history_id__gt=history_id, history_change_reason=MOVED).exists())

    def revert_disabled(self, request: HttpRequest, obj: Any = None) -> bool:
        """Return True if the user may not restore the row, and False if the user may restore it.

        To restore a row, a user needs the permission to change rows. To restore a deleted row, the user also needs the
        permission to add rows.
        """
        if super().revert_disabled(request, obj) or not self.has_change_permission(request, obj):  # type: ignore[misc]
            return True
        record = getattr(obj, "_history", None)  # simple_history's name for the record of a former state
        if record is not None and self.is_before_move(obj.pk, record.pk):
            return True
        exists = obj is None or self.model._base_manager.filter(pk=obj.pk).exists()
        return not (exists or self.has_add_permission(request))

    def render_history_view(
        self, request: HttpRequest, template: str, context: dict[str, Any], **kwargs: Any
    ) -> HttpResponse:
        """Show a former state of a row. Users who may not restore the row see text instead of a form."""
        form = context.get("adminform")
        if form is not None and context["revert_disabled"]:
            fieldsets: Any = self.get_fieldsets(request, context["original"])
            readonly_names = flatten_fieldsets(fieldsets)
            context["adminform"] = AdminForm(form.form, fieldsets, {}, readonly_names, model_admin=self)
        response: HttpResponse = super().render_history_view(request, template, context, **kwargs)  # type: ignore[misc]
        return response


class InForceFilter(admin.SimpleListFilter):
    """Filter rows by their validity period: valid now, valid later, or no longer valid."""

    title = _("in force")
    parameter_name = "in_force"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("now", _("now")), ("later", _("later")), ("ended", _("ended"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        now = moments.now()
        if self.value() == "now":
            return queryset.exclude(valid_from__gt=now).exclude(valid_until__lte=now)
        if self.value() == "later":
            return queryset.filter(valid_from__gt=now)
        if self.value() == "ended":
            return queryset.filter(valid_until__lte=now)
        return queryset
