"""Lengths of time as people type them ("1 day", "5 min", "1h" or plain seconds), stored as seconds."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.db import models
from django.utils.translation import gettext_lazy as _

_SECONDS = {
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), 1),
    **dict.fromkeys(("min", "mins", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), 3_600),
    **dict.fromkeys(("d", "day", "days"), 86_400),
    **dict.fromkeys(("w", "week", "weeks"), 604_800),
}
_PART = r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*"
_NUMBER = re.compile(r"[+-]?[0-9]*\.?[0-9]+(?:e[+-]?[0-9]{1,2})?", re.IGNORECASE)
_WRONG = _("“%(text)s” is not a length of time: write seconds, such as 60, or a number and s, min, h, day or week.")


def seconds(text: str) -> Decimal:
    """Return the number of seconds for a text such as "90", "1.5 h" or "1 day 12 h".

    Raises ValidationError for any other text. "1 m" is refused, since it may mean a minute or a month.
    """
    plain = text.strip().lower()
    if _NUMBER.fullmatch(plain):
        return Decimal(plain)
    parts = re.findall(_PART, plain)
    known = all(unit in _SECONDS for _count, unit in parts)
    if not (parts and known and re.fullmatch(f"(?:{_PART})+", plain)):
        raise ValidationError(_WRONG, code="invalid", params={"text": text})
    return sum((Decimal(count) * _SECONDS[unit] for count, unit in parts), Decimal(0))


def _read(value: Any) -> Any:
    return seconds(value) if isinstance(value, str) and value.strip() else value


class SecondsFormField(forms.DecimalField):
    """A form field for seconds, or for a number with its unit.

    Its widget is a text input: a number input would drop the letters of "1 day" and send 1.
    """

    widget = forms.TextInput

    def to_python(self, value: Any) -> Any:
        return super().to_python(_read(value))


class SecondsField(models.DecimalField):  # type: ignore[type-arg]
    """A column of seconds, which also accepts texts such as "1 day"."""

    def to_python(self, value: Any) -> Any:
        return super().to_python(_read(value))

    def formfield(self, **kwargs: Any) -> Any:
        return super().formfield(**{"form_class": SecondsFormField, **kwargs})

    def deconstruct(self) -> Any:
        """Return the deconstruction of Django's own column, since only the typed form differs."""
        name, _path, args, kwargs = super().deconstruct()
        return name, "django.db.models.DecimalField", args, kwargs
