"""The form of a rule."""

from __future__ import annotations

import json
from typing import Any

from django.core.exceptions import ValidationError
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext_lazy as _

from ratelimits.admin.rule_form.rule_text import effect, explanations
from ratelimits.admin.rule_form.typed_forms import SuggestingInput, TypedRates
from ratelimits.algorithms.limits import ALGORITHMS, fields_of
from ratelimits.algorithms.windows import BILLING_PERIOD
from ratelimits.conf import conf
from ratelimits.models import Rule
from ratelimits.models.fields.numbers import typed_formfield
from ratelimits.models.fields.rule_fields import PARAMETERS
from ratelimits.models.rule_parts.coverage import Coverage
from ratelimits.models.users import groups_field
from ratelimits.unknown_names import keys_of_views, written_in_views

#: The fields that say how a rule counts.
COUNTING_FIELDS = ("algorithm", *PARAMETERS, "max_wait")
#: The fields of `COUNTING_FIELDS` that most rules have.
MAIN_NUMBERS = ("capacity", "rate", "period", "calendar_unit", "timezone", "max_wait")
#: The fields that say which requests a rule covers, and by which key it counts them.
COVERAGE = tuple(field.name for field in Coverage._meta.get_fields())
#: The fields that say whose requests a rule refuses.
_WHO_IS_REFUSED = (*COUNTING_FIELDS, *COVERAGE, "meter", "mode", "plan_id")
#: By unit of a calendar window: the fields that the account has instead of the rule.
_FIELDS_OF_ACCOUNT = {BILLING_PERIOD: ["timezone", "anchor"]}
#: Name of the button with which a user confirms a rule that would refuse everyone.
EVERYONE_MEANT = "_everyone_meant"
#: Maximum number of groups that the form suggests.
_MAX_GROUPS = 200


def _fields_by_algorithm() -> dict[str, list[str]]:
    return {name: [*fields_of(name), *(["max_wait"] if kind.may_wait else [])] for name, kind in ALGORITHMS.items()}


def _algorithm_explanations() -> Any:
    labels = ((_(ALGORITHMS[name].label), text) for name, text in explanations().items())
    rows = format_html_join("", "<dt>{}</dt><dd>{}</dd>", labels)
    return format_html("<details><summary>{}</summary><dl>{}</dl></details>", _("What each algorithm does"), rows)


def scopes_of_views() -> list[str]:
    """Return the scopes that a form suggests: the scopes in the code of views, and "*"."""
    scopes, _meters_of_views = written_in_views()
    return sorted({"*"} | scopes)


def _groups() -> list[str]:
    field = groups_field()
    if field is None:
        return []
    groups = field.related_model._base_manager.order_by("name")
    return list(groups.values_list("name", flat=True)[:_MAX_GROUPS])


def _view_keys() -> list[str]:
    return sorted(keys_of_views())


def _meters() -> list[str]:
    _scopes, meters = written_in_views()
    return sorted(meters | conf.UNITS.keys())


class RuleForm(TypedRates):
    """A form for a rule. A script of the page shows only the fields of the chosen algorithm."""

    class Meta:
        model = Rule
        exclude: list[str] = []  # RuleAdmin.fieldsets names the fields.
        formfield_callback = typed_formfield

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        algorithm = self.fields.get("algorithm")
        if algorithm is not None:
            algorithm.widget.attrs["data-ratelimits-fields"] = json.dumps(_fields_by_algorithm())
            algorithm.widget.attrs["data-ratelimits-explanations"] = json.dumps(explanations())
            algorithm.help_text = _algorithm_explanations()
        if "calendar_unit" in self.fields:
            self.fields["calendar_unit"].widget.attrs["data-ratelimits-hides"] = json.dumps(_FIELDS_OF_ACCOUNT)
        for name in self.fields.keys() & {"callers", "refusal_status"}:
            # A POST without this field keeps the saved value. But an empty value is refused.
            self.fields[name].required = self.is_bound and self.add_prefix(name) in self.data
        suggested = ("scope", scopes_of_views), ("meter", _meters), ("group", _groups), ("view_key", _view_keys)
        for name, suggestions in suggested:
            if name in self.fields:
                attrs = self.fields[name].widget.attrs
                self.fields[name].widget = SuggestingInput(suggestions, attrs)

    def typed_rule(self) -> tuple[Rule | None, dict[str, list[str]]]:
        """Return the rule that the typed values describe, and an empty dict.

        If fields that say how the rule counts have errors, return None, and the errors by field. Ignore errors of
        other fields, such as the name.
        """
        names = {
            *COUNTING_FIELDS,
            "key_kind",
            "view_key",
            "callers",
            "group",
            "except_scopes",
            "ipv4_prefix",
            "ipv6_prefix",
            "mode",
        }
        errors = {
            name: [str(message) for message in messages] for name, messages in self.errors.items() if name in names
        }
        return (None, errors) if errors else (self.instance, {})


class TriedRuleForm(RuleForm):
    """The form that tries a rule without saving it. If the capacity is empty, the typed rate is also the capacity."""

    def _split_typed_rate(self, data: Any) -> None:
        super()._split_typed_rate(data)
        algorithm, rate = data.get("algorithm"), str(data.get("rate") or "")
        takes_both = algorithm in ALGORITHMS and {"rate", "capacity"} <= {*fields_of(algorithm)}
        # The method of the base class has replaced a typed rate such as "10/5min" by its number.
        if takes_both and not data.get("capacity") and rate.isdecimal():
            data["capacity"] = rate

    def errors_with_labels(self, errors: dict[str, list[str]]) -> list[str]:
        """Return errors as sentences that begin with the label of the field."""
        return [
            f"{self[name].label}: {message}" if name in self.fields else message
            for name, messages in errors.items()
            for message in messages
        ]


class SavedRuleForm(RuleForm):
    """The form that saves a rule. If the rule would refuse everyone, the form asks the user to confirm this."""

    def _post_clean(self) -> None:
        super()._post_clean()  # type: ignore[misc]
        if self.errors or EVERYONE_MEANT in self.data or self.instance.mode != Rule.Mode.ENFORCE:
            return
        saved = None if self.instance.pk is None else Rule.objects.filter(pk=self.instance.pk).first()
        if saved is not None and all(getattr(saved, name) == getattr(self.instance, name) for name in _WHO_IS_REFUSED):
            return
        expected = effect(self.instance, self.instance.to_algorithm())
        if expected.refuses_everyone:
            button = '{} <button type="submit" class="button" name="{}" value="1">{}</button>'
            label = _("Save the rule, and refuse everyone")
            self.add_error(None, ValidationError(format_html(button, expected.text, EVERYONE_MEANT, label)))
