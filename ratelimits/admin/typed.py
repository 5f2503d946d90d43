"""Inputs for numbers and for moments, moments as text, and the ids of rows that a URL or a form names.

An input for a number sends exactly what the user typed. An input for a moment accepts a time without a date. No text
reaches the database as an id unchecked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime, timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.utils import flatten_fieldsets
from django.contrib.admin.widgets import AdminSplitDateTime
from django.core.exceptions import ValidationError
from django.db.models import DateTimeField, Field
from django.http import Http404, HttpRequest
from django.utils.functional import lazy
from django.utils.text import format_lazy
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ratelimits import moments
from ratelimits.models.fields.numbers import form_class_of
from ratelimits.moments.columns import LocalSplitDateTimeInput, UTCDateTimeField

if TYPE_CHECKING:
    from django.db.models import QuerySet

    _Base = admin.ModelAdmin[Any]
    _Page = admin.ModelAdmin[Any]
else:
    _Base = object
    _Page = admin.ModelAdmin


class TypedNumbers(_Base):
    """Mixin for admin pages and inlines: a number has a text input, and is read as the user's language writes it.

    An input of type "number" would lose letters: from "10k" it would send 10.
    """

    def formfield_for_dbfield(self, db_field: Field[Any, Any], request: HttpRequest | None, **kwargs: Any) -> Any:
        kwargs = form_class_of(db_field) | kwargs
        field = super().formfield_for_dbfield(db_field, request, **kwargs)  # type: ignore[arg-type]
        if field is not None and isinstance(field.widget, forms.NumberInput):
            field.widget.input_type = "text"
            field.widget.attrs = {"inputmode": "decimal", **field.widget.attrs}
            for name in ("step", "min", "max"):
                field.widget.attrs.pop(name, None)
        return field


@cache
def _shown(model: Any, name: str) -> Callable[[Any], str]:
    """Return a column that shows a moment of a row. The name and the label of the column are those of the field."""

    @admin.display(description=model._meta.get_field(name).verbose_name, ordering=name)
    def shown(row: Any) -> str:
        return local_time(getattr(row, name))

    shown.__name__ = name
    return shown


class LocalMoments(_Base):
    """Mixin for admin pages: moments have the time zone of the page, and the text names it.

    Django itself shows a moment in UTC if `USE_TZ` is False.
    """

    def get_list_display(self, request: HttpRequest) -> Any:
        return self.columns(super().get_list_display(request))

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        return self.columns(super().get_readonly_fields(request, obj))

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the fieldsets. Names of moments that the user cannot change become columns."""
        only_text = {column.__name__ for column in self.get_readonly_fields(request, obj) if callable(column)}
        if obj is not None and not self.has_change_permission(request, obj):
            only_text |= {field.name for field in self.model._meta.concrete_fields}

        def changed(name: Any) -> Any:
            if isinstance(name, list | tuple):
                return [changed(one) for one in name]
            return self.columns([name])[0] if name in only_text else name

        return [
            (title, {**options, "fields": changed([*options["fields"]])})
            for title, options in super().get_fieldsets(request, obj)
        ]

    def get_form(self, request: HttpRequest, obj: Any = None, change: bool = False, **kwargs: Any) -> Any:
        """Return the form. Its fields have names: a form cannot have a column."""
        names = kwargs.get("fields") or flatten_fieldsets(self.get_fieldsets(request, obj))
        only_text = self.get_readonly_fields(request, obj)
        kwargs["fields"] = [name.__name__ if callable(name) and name not in only_text else name for name in names]
        return super().get_form(request, obj, change, **kwargs)

    def columns(self, names: Iterable[Any]) -> list[Any]:
        """Return columns for a list. A subclass that overrides `get_list_display` must call this there."""
        fields = self.model._meta.concrete_fields
        moments_of_row = {field.name for field in fields if isinstance(field, UTCDateTimeField)}
        return [_shown(self.model, name) if name in moments_of_row else name for name in names]  # type: ignore[arg-type]


def _help_for_moments() -> str:
    text = _("In the time zone %(zone)s. A time without a date means today, or tomorrow if this time has passed today.")
    return text % {"zone": moments.zone_name()}


class MomentField(LocalSplitDateTimeInput):
    """A field for a date and a time. If only the time is typed, the field takes the next moment with this time."""

    widget = AdminSplitDateTime
    default_error_messages = {
        "invalid_date": gettext_lazy("Write a date such as 2026-11-25. For today or tomorrow, leave the date empty."),
        "invalid_time": gettext_lazy("Write a time such as 18:00."),
    }

    def __init__(self, *, help_text: Any = "", **kwargs: Any) -> None:
        text = lazy(_help_for_moments, str)()
        super().__init__(help_text=format_lazy("{} {}", help_text, text) if help_text else text, **kwargs)

    def clean(self, value: Any) -> Any:
        """Return the moment. Raise ValidationError if only the date is typed."""
        date, time = value if isinstance(value, list | tuple) else (None, None)
        if date and not time:
            raise ValidationError(self.error_messages["invalid_time"], code="invalid_time")
        if time and not date:
            now = moments.local(moments.now())
            _date_field, time_field = self.fields
            is_over = datetime.combine(now, time_field.clean(time)) <= now.replace(tzinfo=None)
            value = [now.date() + timedelta(days=1 if is_over else 0), time]
        return super().clean(value)


#: `formfield_overrides` for the admin pages of rows that begin and end at moments.
MOMENTS: dict[Any, Any] = {DateTimeField: {"form_class": MomentField, "widget": AdminSplitDateTime}}


def local_time(moment: datetime | None) -> str:
    """Return a moment as text, in the time zone of the page; "–" for None."""
    return "–" if moment is None else moments.local_text(moment)


def moment_inputs(name: str, moment: datetime | None) -> dict[str, str]:
    """Return the values of the two inputs of a moment, by input name. Fractions of a second are left out."""
    if moment is None:
        return {f"{name}_0": "", f"{name}_1": ""}
    local = moments.local(moment)
    return {f"{name}_0": f"{local:%Y-%m-%d}", f"{name}_1": f"{local:%H:%M:%S}"}


def primary_key(model: Any, text: str) -> Any:
    """Return the primary key of a model that a text names. Raise Http404 if the text cannot be one.

    SQLite raises OverflowError for a number that it cannot store, Python ValueError for one with more than 4,300
    digits, and PostgreSQL refuses a text with a NUL character.
    """
    if "\0" in text:
        raise Http404
    try:
        return model._meta.pk.clean(text, None)
    except (ValidationError, ValueError) as error:
        raise Http404 from error


class ChecksIds(_Page):
    """An admin page that finds no row for an id that no row can have. Its actions then answer 404."""

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Any:
        return None if "\0" in object_id else super().get_object(request, object_id, from_field)

    def response_action(self, request: HttpRequest, queryset: QuerySet[Any], *args: Any, **kwargs: Any) -> Any:
        for text in request.POST.getlist(ACTION_CHECKBOX_NAME):
            primary_key(self.model, text)
        return super().response_action(request, queryset, *args, **kwargs)
