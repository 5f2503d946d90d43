"""A short form that tries a limit on the requests of the last 24 hours, without the long form of a rule."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django import forms
from django.core.exceptions import ValidationError
from django.utils.translation import gettext_lazy as _

from ratelimits.admin.rule_form.forms import scopes_of_views
from ratelimits.admin.rule_form.typed_forms import SuggestingInput
from ratelimits.algorithms import typed_rates
from ratelimits.algorithms.typed_numbers import Mistyped
from ratelimits.models.fields.numbers import mistyped, notation
from ratelimits.models.keys import KeyKind

#: The rule has these values. The form does not ask for them.
_FIXED_VALUES = {"name": "tried", "meter": "requests", "mode": "enforce", "algorithm": "sliding_window"}


class QuickTryForm(forms.Form):
    """A form that asks for a limit such as "50 a minute", for the kind of key, and for the scope."""

    required_css_class = "required"
    limit = forms.CharField(
        label=_("Limit"), max_length=60, help_text=_("Such as 50 a minute, 50/m, 1000/h or 10/5min.")
    )
    key_kind = forms.ChoiceField(label=_("Counted per"), choices=KeyKind.choices, initial=KeyKind.CALLER)
    scope = forms.CharField(
        label=_("Scope"),
        max_length=255,
        initial="*",
        widget=SuggestingInput(scopes_of_views),
        help_text=_("* stands for all requests."),
    )

    def clean_limit(self) -> str:
        """Return the typed limit. Refuse a number without a time, and a text that is not a limit."""
        limit = str(self.cleaned_data["limit"])
        try:
            typed_rates.rate(limit, notation())
        except Mistyped as error:
            if error.is_ambiguous:
                raise mistyped(error) from error
            hint = _(
                "Write a number and a time: 50/s, 50/m, 50/h, 50/d, 50/week, 50/5min or 50 a minute. Months have no"
                " fixed length: write days, such as 1000/30d."
            )
            raise ValidationError(hint) from error
        return limit

    def rule_values(self) -> dict[str, Any]:
        """Return the values for the form of a rule that counts in a sliding window.

        `capacity` gets the whole limit, such as "50/m". The form of a rule splits it into a capacity and a period.
        """
        data = self.cleaned_data
        return {**_FIXED_VALUES, "capacity": data["limit"], "key_kind": data["key_kind"], "scope": data["scope"]}

    @staticmethod
    def rule_query(rule: Any) -> str:
        """Return a query string for the page that adds a rule. The form then has the values of the tried rule."""
        values = {name: getattr(rule, name) for name in ("scope", "key_kind", "meter", "algorithm", "capacity")}
        return f"?{urlencode({**values, 'period': f'{rule.period.normalize():f}'})}"
