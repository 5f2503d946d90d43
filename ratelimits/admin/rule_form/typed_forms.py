"""Forms for the numbers of limits: they accept rates such as "10/5min", and suggest names that views use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

from django import forms
from django.core.exceptions import ValidationError
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext_lazy as _

from ratelimits.algorithms import typed_rates
from ratelimits.algorithms.limits import ALGORITHMS, fields_of
from ratelimits.algorithms.typed_rates import Mistyped, is_rate
from ratelimits.algorithms.wording import number
from ratelimits.models.fields.durations import mistyped, seconds

_OTHER_PERIOD = _("The rate %(rate)s contains a period: leave this field as it was, or write the rate as a number.")


class SuggestingInput(forms.TextInput):
    """A text input with a list of suggestions. Other texts are allowed too."""

    def __init__(self, suggestions: Callable[[], Iterable[str]], attrs: dict[str, Any] | None = None) -> None:
        super().__init__(attrs)
        self.suggestions = suggestions

    def render(self, name: str, value: Any, attrs: dict[str, Any] | None = None, renderer: Any = None) -> SafeString:
        list_id = f"{(attrs or {}).get('id', name)}_suggestions"
        options = format_html_join("", '<option value="{}"></option>', ((text,) for text in self.suggestions()))
        # Without autocomplete="off", the browser's list of earlier inputs would cover the suggestions.
        shown = super().render(name, value, {**(attrs or {}), "list": list_id, "autocomplete": "off"}, renderer)
        return format_html('{}<datalist id="{}">{}</datalist>', shown, list_id, options)


class TypedRates(forms.ModelForm):  # type: ignore[type-arg]
    """A form that accepts a rate such as "10/5min" in the field of the rate, or of a window's capacity.

    The number becomes the rate (or capacity), and the rest becomes the period.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, value in self.initial.items():
            if isinstance(value, Decimal):  # Remove the trailing zeros.
                self.initial[name] = Decimal(number(value).replace(",", ""))
        self._rate_errors: dict[str, ValidationError] = {}
        if self.is_bound and "period" in self.fields:
            data: Any = self.data
            self.data = typed = data.copy()
            self._split_typed_rate(typed)

    def _rate_fields(self) -> tuple[str, ...]:
        """Return the fields in which a rate can be typed. If the algorithm has no rate, this is the capacity."""
        algorithm = self.data.get("algorithm")
        known = fields_of(algorithm) if algorithm in ALGORITHMS else ("rate", "capacity", "period")
        names = ("rate",) if "rate" in known and algorithm else ("capacity", "rate")
        return tuple(name for name in names if name in known) if "period" in known else ()

    def _split_typed_rate(self, data: Any) -> None:
        typed = {name: str(data.get(name) or "") for name in ("rate", "capacity")}
        for name in (name for name, text in typed.items() if is_rate(text)):
            if name not in self._rate_fields():
                continue  # The field's own validation says that the text is not a number.
            try:
                permits, period = typed_rates.rate(typed[name])
            except Mistyped as error:
                self._rate_errors[name] = mistyped(error)
                continue
            other = self._other_period(period)
            data[name] = f"{permits:f}"
            if other:
                self._rate_errors["period"] = ValidationError(_OTHER_PERIOD, params={"rate": typed[name]})
            else:
                data["period"], data["period_unit"] = typed_rates.length_and_unit(period)

    def _other_period(self, period: Decimal) -> bool:
        """Return whether the user has changed the form's period to a value other than `period`."""
        text = self.fields["period"].widget.value_from_datadict(self.data, self.files, "period")
        try:
            given = seconds(text) if text else None
        except ValidationError:
            return True
        before = self.initial.get("period")
        return given is not None and given not in (period, None if before in (None, "") else Decimal(str(before)))

    def _clean_fields(self) -> None:
        super()._clean_fields()  # type: ignore[misc]
        for name, error in self._rate_errors.items():
            if name in self.errors:
                del self.errors[name]
            self.add_error(name, error)
