"""Text inputs for numbers. They send exactly what the user typed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django import forms
from django.contrib import admin
from django.db.models import Field
from django.http import HttpRequest

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
