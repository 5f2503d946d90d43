"""Fields for lengths of time. People type "1 day", "5 min", "1h" or plain seconds; the database stores seconds."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.db import models
from django.utils.translation import gettext_lazy

from ratelimits.algorithms import typed_rates
from ratelimits.algorithms.typed_numbers import PLAIN, Mistyped, Notation, written
from ratelimits.models.fields.numbers import mistyped, notation

#: A number, perhaps with signs between its digits, without a unit.
_WITHOUT_UNIT = re.compile(r"\s*[0-9][0-9.,'’\s]*|\s*[.,][0-9]+\s*")
_UNITS = [
    ("s", gettext_lazy("seconds")),
    ("min", gettext_lazy("minutes")),
    ("h", gettext_lazy("hours")),
    ("day", gettext_lazy("days")),
    ("week", gettext_lazy("weeks")),
]


def seconds(text: str, written_as: Notation = PLAIN) -> Decimal:
    """Return the seconds in a text such as "90", "1.5 h" or "1 day 12 h". Raise ValidationError if it is not valid."""
    try:
        return typed_rates.seconds(text, written_as)
    except Mistyped as error:
        raise mistyped(error) from error


def _to_seconds(value: Any, written_as: Notation = PLAIN) -> Any:
    return seconds(value, written_as) if isinstance(value, str) and value.strip() else value


class LengthInput(forms.MultiWidget):
    """An input for a number beside a list of units. If the typed text has its own unit, the list's unit is ignored."""

    use_fieldset = False

    def __init__(self, attrs: dict[str, Any] | None = None) -> None:
        unit = forms.Select({"aria-label": gettext_lazy("Unit of time"), "class": "ratelimits-unit"}, _UNITS)
        # Each input has the name of the field and one of these suffixes. With "", it has the name of the field itself.
        super().__init__({"": forms.TextInput(), "unit": unit}, attrs)

    def id_for_label(self, id_: str) -> str:
        """Return the id of the text input, so that a click on the label goes there."""
        return f"{id_}_0" if id_ else id_

    def decompress(self, value: Any) -> list[str]:
        """Return the number and the unit that the input shows for a value. The value is seconds or a typed text."""
        if value is None or value == "":
            return ["", "s"]
        try:
            length = value if isinstance(value, Decimal) else seconds(str(value), notation())
            return [*typed_rates.length_and_unit(length, notation())]
        except ValidationError:
            return [str(value), "s"]

    def value_from_datadict(self, data: Any, files: Any, name: str) -> Any:
        """Return the typed text. If it has no unit, add the unit of the list."""
        number, unit = super().value_from_datadict(data, files, name)
        without_unit = isinstance(number, str) and _WITHOUT_UNIT.fullmatch(number)
        return f"{number} {unit}" if without_unit and unit not in (None, "", "s") else number


class _HiddenLength(forms.HiddenInput):
    """A hidden input with seconds, which the field reads as it reads a typed length."""

    def format_value(self, value: Any) -> Any:
        return written(value, notation()) if isinstance(value, Decimal) else super().format_value(value)


class SecondsFormField(forms.DecimalField):
    """A form field for seconds, or for a number with its unit.

    The input is a text input, because a number input would remove the letters of "1 day".
    """

    widget = LengthInput
    hidden_widget = _HiddenLength
    #: How numbers are written; None means as in the language of the present request.
    notation: Notation | None = None

    def to_python(self, value: Any) -> Any:
        return super().to_python(_to_seconds(value, self.notation or notation()))


class SecondsField(models.DecimalField):  # type: ignore[type-arg]
    """A column of seconds, which also accepts texts such as "1 day"."""

    def to_python(self, value: Any) -> Any:
        return super().to_python(_to_seconds(value))

    def formfield(self, **kwargs: Any) -> Any:
        return super().formfield(**{"form_class": SecondsFormField, **kwargs})

    def deconstruct(self) -> Any:
        """Return a plain `DecimalField` for migrations. Only the form field differs, and migrations need no form."""
        name, _path, args, kwargs = super().deconstruct()
        return name, "django.db.models.DecimalField", args, kwargs
