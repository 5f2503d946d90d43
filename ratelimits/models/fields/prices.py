"""A column for prices. It stores text, because SQLite turns a decimal of more than 15 digits into a float."""

from __future__ import annotations

from decimal import Decimal, InvalidOperation
from typing import Any

from django.core.exceptions import ValidationError
from django.core.validators import DecimalValidator, MinValueValidator
from django.db import models
from django.utils.translation import gettext_lazy as _

from ratelimits import money
from ratelimits.algorithms import typed_numbers
from ratelimits.algorithms.typed_numbers import Mistyped
from ratelimits.models.fields.numbers import DecimalFormField, mistyped

_LENGTH = money.WHOLE_DIGITS + 1 + money.PLACES
_VALIDATORS: list[Any] = [
    MinValueValidator(money.ZERO, _("A price cannot be below 0. To give units back, use an adjustment.")),
    DecimalValidator(money.WHOLE_DIGITS + money.PLACES, money.PLACES),
]


class PriceField(models.Field):  # type: ignore[type-arg]
    """A column whose values are prices (`Decimal`), stored as text without trailing zeros.

    If raw SQL has written a text that is no number, the value is this text. Whoever calculates with it must refuse it.
    """

    empty_strings_allowed = False
    default_validators = _VALIDATORS

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"max_length": _LENGTH, **kwargs})

    def get_internal_type(self) -> str:
        return "CharField"

    def deconstruct(self) -> Any:
        """Return a plain `CharField` for migrations. They store texts, and need no prices."""
        name, _path, args, kwargs = super().deconstruct()
        if isinstance(kwargs.get("default"), Decimal):
            kwargs["default"] = money.written(kwargs["default"])
        return name, "django.db.models.CharField", args, kwargs

    def from_db_value(self, value: Any, _expression: Any, _connection: Any) -> Any:
        try:
            return value if value is None else Decimal(value)
        except InvalidOperation:
            return value

    def to_python(self, value: Any) -> Any:
        """Return a decimal. Raise ValidationError if the value is none."""
        if value is None or value == "":
            return None
        try:
            number = typed_numbers.decimal(value) if isinstance(value, str) else Decimal(value)
        except Mistyped as error:
            raise mistyped(error) from error
        except (ValueError, TypeError, InvalidOperation) as error:
            raise ValidationError(str(error), code="invalid") from error
        return Decimal(money.written(number)) if number.is_finite() else number

    def get_prep_value(self, value: Any) -> Any:
        value = super().get_prep_value(value)
        if isinstance(value, int | Decimal) and Decimal(value).is_finite():
            return money.written(Decimal(value))
        return value

    def value_to_string(self, obj: Any) -> str:
        return str(self.get_prep_value(self.value_from_object(obj)))

    def formfield(self, **kwargs: Any) -> Any:
        digits = {"max_digits": money.WHOLE_DIGITS + money.PLACES, "decimal_places": money.PLACES}
        return super().formfield(**{"form_class": DecimalFormField, **digits, **kwargs})
