"""Overrides in the admin: other numbers, or another mode, of a rule for one key."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ratelimits import moments
from ratelimits.admin.audited import AuditedAdmin, InForceFilter
from ratelimits.admin.inspected import InspectedAdmin
from ratelimits.admin.operate.confirming import Consequences
from ratelimits.admin.operate.ending import EndsRows
from ratelimits.admin.operate.running import override_text
from ratelimits.admin.row_files.page import RowFiles
from ratelimits.admin.rule_form.typed_forms import TypedRates
from ratelimits.admin.suggestions import KeySuggestions
from ratelimits.admin.typed import MOMENTS, local_time
from ratelimits.algorithms.base import number
from ratelimits.conf import conf
from ratelimits.models import KeyOverride, Rule
from ratelimits.models.fields.numbers import typed_formfield
from ratelimits.models.overrides import rules_by_name, valid_rules

_NOT_IN_FORCE = gettext_lazy("not in force: %(error)s")


class KeyOverrideForm(TypedRates):
    """A form for an override. The user chooses one of the names of existing rules."""

    rule = forms.ChoiceField(
        label=gettext_lazy("Rule"),
        help_text=gettext_lazy("Name of the rule. The override applies in every plan that the key is on."),
    )

    class Meta:
        model = KeyOverride
        exclude: list[str] = []
        formfield_callback = typed_formfield

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        rule = self.fields.get("rule")
        if isinstance(rule, forms.ChoiceField):
            names = {*Rule.objects.order_by().values_list("name", flat=True), self.instance.rule} - {""}
            rule.choices = [("", "---------"), *((name, name) for name in sorted(names))]


@admin.register(KeyOverride)
class KeyOverrideAdmin(EndsRows, KeySuggestions, InspectedAdmin, RowFiles, AuditedAdmin):
    """The overrides of all keys."""

    form = KeyOverrideForm
    formfield_overrides = MOMENTS

    class Media:
        css = {"all": ["ratelimits/rule_form.css"]}

    list_filter = [InForceFilter, "rule", "mode"]
    search_fields = ["key", "rule", "reason"]
    fieldsets = [
        (None, {"fields": ["key", "rule", "reason"]}),
        (gettext_lazy("What differs"), {"fields": [*KeyOverride.NUMBERS, "mode"]}),
        (gettext_lazy("When"), {"fields": ["valid_from", "valid_until"]}),
    ]

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        """Return the columns. The column with the numbers reads the rules only once for all rows of the list."""
        rules = cache(lambda: rules_by_name(conf.DATABASE))
        # Validate only the rules of the rows that are shown.
        valid_rules_named = cache(lambda name: valid_rules(rules().get(name, ())))

        @admin.display(description=gettext_lazy("what differs"))
        def numbers(override: KeyOverride) -> str:
            reason = override.numbers_error(valid_rules_named(override.rule))
            changes = ", ".join(f"{name} {number(value)}" for name, value in override.changes().items()) or "–"
            return f"{changes} ({_NOT_IN_FORCE % {'error': reason}})" if reason else changes

        columns: list[Any] = ["key", "rule", numbers, "mode", "valid_from", "valid_until", "reason"]
        return [*self.columns(columns), *self.inspect_columns(request)]

    def inspected(self, row: KeyOverride) -> tuple[str, str]:
        return row.key, ""

    def may_end(self, request: HttpRequest, row: KeyOverride) -> bool:
        """Return whether the user may end an override. An override that has not begun yet is deleted."""
        begins_later = row.valid_from is not None and row.valid_from > moments.now()
        return super().may_end(request, row) and (not begins_later or self.has_delete_permission(request, row))

    def end_consequences(self, rows: Sequence[KeyOverride]) -> Consequences:
        """Return what applies after these overrides have ended, and a table of the overrides."""
        sentences = [
            _("The numbers of the rule apply again from the next request on. Permits that were used stay counted.")
        ]
        for row in rows:
            others = KeyOverride.objects.using(conf.DATABASE).filter(key=row.key, rule=row.rule).exclude(pk=row.pk)
            following = others.filter(valid_from__gt=moments.now()).order_by("valid_from").first()
            if following is not None:
                values = {"begin": local_time(following.valid_from), "changes": override_text(following)}
                sentences.append(_("From %(begin)s on, another override applies: %(changes)s.") % values)
        heads = [_("key"), _("rule"), _("what differs"), _("valid until"), _("reason")]
        table = [(row.key, row.rule, override_text(row), local_time(row.valid_until), row.reason) for row in rows]
        return Consequences(_("End now"), sentences, heads=heads, rows=table)

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Show the form. If the override is not in force, a warning above the form says why."""
        override = kwargs.get("obj")
        if override is not None:
            rules = Rule.objects.using(conf.DATABASE).select_related("plan").filter(name=override.rule)
            reason = override.numbers_error(valid_rules(rules))
            if reason:
                self.message_user(request, _NOT_IN_FORCE % {"error": reason}, messages.WARNING)
        return super().render_change_form(request, context, *args, **kwargs)
