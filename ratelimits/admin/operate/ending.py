"""End rows that have a validity period: blocks, allows and overrides. A page asks for the reason first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ratelimits import moments
from ratelimits.admin.audited import REASON, recorded_user
from ratelimits.admin.operate.confirming import Consequences, confirmation, is_confirmed
from ratelimits.models.history import MAX_REASON

if TYPE_CHECKING:
    _Base = admin.ModelAdmin[Any]
else:
    _Base = object

#: Maximum number of rows that a message names.
_MAX_NAMED = 10


class EndForm(forms.Form):
    """A form that asks why a row ends."""

    required_css_class = "required"
    reason = forms.CharField(label=gettext_lazy("Reason"), max_length=MAX_REASON)


def has_ended(row: Any) -> bool:
    """Return whether the validity period of a row has ended."""
    return row.valid_until is not None and row.valid_until <= moments.now()


class EndsRows(_Base):
    """Mixin for admin pages of rows that people can end. The page of a row has a link to end the row."""

    change_form_template = "ratelimits/admin/inspected_change_form.html"

    def get_urls(self) -> list[URLPattern]:
        """Return the URLs of the pages. One of them ends a row."""
        end = self.admin_site.admin_view(self.end_view)
        name = f"{self.model._meta.app_label}_{self.model._meta.model_name}_end"
        return [path("<path:object_id>/end/", end, name=name), *super().get_urls()]

    def may_end(self, request: HttpRequest, row: Any) -> bool:
        """Return whether the user may end a row."""
        return self.has_change_permission(request, row)

    def end_consequences(self, rows: Sequence[Any]) -> Consequences:
        """Return what happens if these rows end now."""
        raise NotImplementedError

    def end_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Ask for a reason, and then end the row."""
        if not self.has_change_permission(request):
            raise PermissionDenied
        row = self.get_object(request, unquote(object_id))
        if row is None:
            raise Http404
        if not self.may_end(request, row):
            raise PermissionDenied
        return self.end_rows(request, [row]) or HttpResponseRedirect(self._list_url())

    def end_rows(self, request: HttpRequest, rows: Iterable[Any]) -> HttpResponse | None:
        """Return the page that asks for a reason. If the request contains the reason, end the rows and return None.

        Rows that have ended before stay as they are. If all rows have ended before, show a warning and return None.
        Rows that begin later are deleted.
        """
        rows = [row for row in rows if not has_ended(row)]
        if not rows:
            self.message_user(
                request, _("There is nothing to end: every chosen row has ended already."), messages.WARNING
            )
            return None
        form = EndForm(request.POST if is_confirmed(request) else None, initial={"reason": request.POST.get(REASON)})
        if not form.is_valid():
            consequences = self.end_consequences(rows)
            return confirmation(request, self.admin_site, self.model._meta, consequences, self._list_url(), form=form)
        with recorded_user(request):
            for row in rows:
                row.end(form.cleaned_data["reason"])
        assert request.user.pk is not None
        LogEntry.objects.log_actions(
            request.user.pk, rows, CHANGE, [{"changed": {"fields": ["valid_until"]}}], single_object=False
        )
        named = ", ".join(map(str, rows[:_MAX_NAMED])) + (", …" if len(rows) > _MAX_NAMED else "")
        self.message_user(request, _("Ended: %(rows)s.") % {"rows": named}, messages.SUCCESS)
        return None

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Show a link above the form if the user may end the row."""
        row = kwargs.get("obj")
        if row is not None and not has_ended(row) and self.may_end(request, row):
            name = f"{self.admin_site.name}:{self.model._meta.app_label}_{self.model._meta.model_name}_end"
            context["end_url"] = reverse(name, args=[row.pk])
        return super().render_change_form(request, context, *args, **kwargs)

    def _list_url(self) -> str:
        return reverse(f"{self.admin_site.name}:{self.model._meta.app_label}_{self.model._meta.model_name}_changelist")
