"""Form fields for numbers that people type. They read and show a number as the user's language writes it."""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any

from django import forms
from django.core.exceptions import ValidationError
from django.db import models
from django.utils.formats import get_format
from django.utils.translation import gettext as _

from ratelimits.algorithms import typed_numbers
from ratelimits.algorithms.typed_numbers import Mistyped, Notation

if TYPE_CHECKING:
    _Field = forms.Field
else:
    _Field = object


def notation() -> Notation:
    """Return how the language of the present request writes numbers."""
    decimal, thousands = str(get_format("DECIMAL_SEPARATOR")), str(get_format("THOUSAND_SEPARATOR"))
    # Where numbers have a decimal point, a comma cannot be one. The admin's own pages show "1,000" in every language.
    return Notation(decimal, thousands or ("," if decimal == "." else ""))


def mistyped(error: Mistyped) -> ValidationError:
    """Return the error of a parser as a ValidationError, with its message in the reader's language."""
    return ValidationError(_(error.template), code="invalid", params=error.values)


class TypedNumber(_Field):
    """Mixin for form fields: a typed number is read by `typed_numbers`. `notation` is by default the language's."""

    notation: Notation | None = None

    def written_as(self) -> Notation:
        """Return the notation in which the field reads and shows numbers."""
        return self.notation or notation()

    def prepare_value(self, value: Any) -> Any:
        """Return a number as the text that the field reads as this number. Return a typed text unchanged."""
        if isinstance(value, int | Decimal) and not isinstance(value, bool):
            return typed_numbers.written(value, self.written_as())
        return super().prepare_value(value)

    def to_python(self, value: Any) -> Any:
        """Return the number that a typed text means. Raise ValidationError with what to write instead."""
        if isinstance(value, str) and value.strip():
            try:
                value = self.read(value, self.written_as())
            except Mistyped as error:
                raise mistyped(error) from error
        return super().to_python(value)

    @staticmethod
    def read(text: str, notation: Notation) -> Decimal | int:
        """Return the number that a text means. Raise Mistyped with what to write instead."""
        raise NotImplementedError


class WholeNumberFormField(TypedNumber, forms.IntegerField):
    """A form field for whole numbers."""

    read = staticmethod(typed_numbers.whole)


class DecimalFormField(TypedNumber, forms.DecimalField):
    """A form field for decimals."""

    read = staticmethod(typed_numbers.decimal)


def typed_formfield(column: models.Field[Any, Any], **kwargs: Any) -> Any:
    """Return the form field of a column. This is the `formfield_callback` of forms that do not come from the admin."""
    return column.formfield(**form_class_of(column) | kwargs)


def form_class_of(column: models.Field[Any, Any]) -> dict[str, Any]:
    """Return the arguments with which `column.formfield` makes a field that reads typed numbers; {} if it has none."""
    if isinstance(column, models.IntegerField) and not column.choices:
        return {"form_class": WholeNumberFormField}
    # A subclass, such as that for lengths of time, has a form field of its own.
    return {"form_class": DecimalFormField} if type(column) is models.DecimalField else {}
