"""Forms for the numbers of limits. These forms accept rates such as "10/5min". Text inputs can suggest values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from decimal import Decimal, InvalidOperation
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ratelimits.algorithms import typed_rates
from ratelimits.algorithms.limits import ALGORITHMS, fields_of
from ratelimits.algorithms.typed_numbers import Mistyped, written
from ratelimits.algorithms.typed_rates import is_rate
from ratelimits.models.fields.durations import seconds
from ratelimits.models.fields.numbers import mistyped, notation

_OTHER_PERIOD = _("The rate %(rate)s contains a period: empty this field, or write the rate as a number.")


class SuggestingInput(forms.TextInput):
    """A text input with a list of suggestions. Users can also type other texts."""

    def __init__(self, suggestions: Callable[[], Iterable[str]], attrs: dict[str, Any] | None = None) -> None:
        super().__init__(attrs)
        self.suggestions = suggestions

    def render(self, name: str, value: Any, attrs: dict[str, Any] | None = None, renderer: Any = None) -> SafeString:
        list_id = f"{(attrs or {}).get('id', name)}_suggestions"
        options = format_html_join("", '<option value="{}"></option>', ((text,) for text in self.suggestions()))
        # Without autocomplete="off", the browser would show earlier inputs in front of the suggestions.
        text_input = super().render(name, value, {**(attrs or {}), "list": list_id, "autocomplete": "off"}, renderer)
        return format_html('{}<datalist id="{}">{}</datalist>', text_input, list_id, options)


class TypedRates(forms.ModelForm):  # type: ignore[type-arg]
    """A form that accepts a rate such as "10/5min" in the field `rate`; for windows, in the field `capacity`.

    The number before the slash becomes the value of the field. The time after the slash becomes the period.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, value in self.initial.items():
            # A link to the form names a number as the address of a page does: with a point. The field shows it as the
            # user's language writes it.
            if name in self.fields and isinstance(self.fields[name], forms.DecimalField | forms.IntegerField):
                with suppress(InvalidOperation):
                    if isinstance(value, str | Decimal):
                        self.initial[name] = Decimal(written(Decimal(value)))
        #: By name of the field: the error of a typed rate.
        self._rate_errors: dict[str, ValidationError] = {}
        #: By name of the field: a typed rate whose period differs from the field `period`.
        self._rates_with_other_period: dict[str, str] = {}
        if "period" in self.fields:
            # A hidden input has the period with which the page was opened, for example the period of a starting point.
            hidden_input = self.add_initial_prefix("period")
            self.fields["period"].show_hidden_initial = not self.is_bound or hidden_input in self.data
        if self.is_bound and "period" in self.fields:
            data: Any = self.data
            self.data = data.copy()
            self._split_typed_rate(self.data)

    def _rate_fields(self) -> tuple[str, ...]:
        """Return the names of the fields in which a rate can be typed.

        This is `rate`; or `capacity` if the algorithm has no field `rate`; or both if no algorithm is chosen. If the
        algorithm has no period, there is no such field.
        """
        algorithm = self.data.get("algorithm")
        possible = fields_of(algorithm) if algorithm in ALGORITHMS else ("rate", "capacity", "period")
        names = ("rate",) if "rate" in possible and algorithm else ("capacity", "rate")
        return tuple(name for name in names if name in possible) if "period" in possible else ()

    def _split_typed_rate(self, data: Any) -> None:
        """Replace a typed rate in `data` by its number, and set the period."""
        typed = {name: str(data.get(name) or "") for name in ("rate", "capacity")}
        for name, text in typed.items():
            if not is_rate(text):
                continue
            if name not in self._rate_fields():
                continue  # The field's own validation says that the text is not a number.
            try:
                permits, period = typed_rates.rate(text, notation())
            except Mistyped as error:
                self._rate_errors[name] = mistyped(error)
                continue
            has_other_period = self._has_other_period(period)
            data[name] = written(permits, notation())
            if has_other_period:
                self._rate_errors["period"] = ValidationError(_OTHER_PERIOD, params={"rate": text})
                self._rates_with_other_period[name] = text
            else:
                data["period"], data["period_unit"] = typed_rates.length_and_unit(period, notation())

    def _has_other_period(self, period: Decimal) -> bool:
        """Return whether the user has changed the period in the form to another value than `period`."""
        text = self.fields["period"].widget.value_from_datadict(self.data, self.files, "period")
        try:
            typed_period = seconds(text, notation()) if text else None
        except ValidationError:
            return True
        return typed_period is not None and typed_period not in (period, *self._periods_before())

    def _periods_before(self) -> Iterator[Decimal]:
        """Yield the period of the saved row, and the period with which the page was opened."""
        for before in (self.initial.get("period"), self.data.get(self.add_initial_prefix("period"))):
            with suppress(ValidationError):
                if isinstance(before, Decimal):
                    yield before
                elif before not in (None, ""):
                    yield seconds(str(before), notation())

    def _clean_fields(self) -> None:
        super()._clean_fields()  # type: ignore[misc]
        for name, error in self._rate_errors.items():
            if name in self.errors:
                del self.errors[name]
            self.add_error(name, error)
        # Show the typed rate again, and not only its number. Otherwise the next POST would save the number with the
        # other period.
        data: Any = self.data
        for name, text in self._rates_with_other_period.items():
            data[name] = text
