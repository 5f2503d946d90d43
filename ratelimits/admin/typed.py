"""Inputs for numbers and for moments.

An input for a number sends exactly what the user typed. An input for a moment accepts a time without a date.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin
from django.contrib.admin.widgets import AdminSplitDateTime
from django.core.exceptions import ValidationError
from django.db.models import DateTimeField, Field
from django.http import HttpRequest
from django.utils import timezone
from django.utils.functional import lazy
from django.utils.text import format_lazy
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

if TYPE_CHECKING:
    _Base = admin.ModelAdmin[Any]
else:
    _Base = object


class TypedNumbers(_Base):
    """Mixin for admin pages and inlines: a number has a text input.

    An input of type "number" would lose letters: from "10k" it would send 10.
    """

    def formfield_for_dbfield(self, db_field: Field[Any, Any], request: HttpRequest | None, **kwargs: Any) -> Any:
        field = super().formfield_for_dbfield(db_field, request, **kwargs)  # type: ignore[arg-type]
        if field is not None and isinstance(field.widget, forms.NumberInput):
            field.widget.input_type = "text"
            field.widget.attrs = {"inputmode": "decimal", **field.widget.attrs}
            for name in ("step", "min", "max"):
                field.widget.attrs.pop(name, None)
        return field


def _help_for_moments() -> str:
    text = _("In the time zone %(zone)s. A time without a date means today, or tomorrow if this time has passed today.")
    return text % {"zone": timezone.get_current_timezone_name()}


class MomentField(forms.SplitDateTimeField):
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
            now = timezone.localtime()
            _date_field, time_field = self.fields
            is_over = datetime.combine(now, time_field.clean(time)) <= now.replace(tzinfo=None)
            value = [now.date() + timedelta(days=1 if is_over else 0), time]
        return super().clean(value)


#: `formfield_overrides` for the admin pages of rows that begin and end at moments.
MOMENTS: dict[Any, Any] = {DateTimeField: {"form_class": MomentField, "widget": AdminSplitDateTime}}


def local_time(moment: datetime | None) -> str:
    """Return a moment as text, in the time zone of the page; "–" for None."""
    return "–" if moment is None else f"{timezone.localtime(moment):%Y-%m-%d %H:%M %Z}"


def moment_inputs(name: str, moment: datetime | None) -> dict[str, str]:
    """Return the values of the two inputs of a moment, by input name. Fractions of a second are left out."""
    if moment is None:
        return {f"{name}_0": "", f"{name}_1": ""}
    local = timezone.localtime(moment)
    return {f"{name}_0": f"{local:%Y-%m-%d}", f"{name}_1": f"{local:%H:%M:%S}"}
