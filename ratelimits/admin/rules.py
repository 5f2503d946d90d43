"""Rules and overrides in the admin."""

from __future__ import annotations

import json
from decimal import Decimal
from functools import cache
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import URLPattern, path, reverse
from django.utils import timezone
from django.utils.html import format_html
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from ratelimits.admin.audited import AuditedAdmin
from ratelimits.algorithms.limits import ALGORITHMS, fields_of
from ratelimits.algorithms.wording import number
from ratelimits.conf import conf
from ratelimits.models import KeyOverride, Rule
from ratelimits.models.fields.rule_fields import PARAMETERS
from ratelimits.models.overrides import readable_rules

_NOT_IN_FORCE = _("not in force: %(error)s")


def _fields_by_algorithm() -> dict[str, list[str]]:
    return {name: [*fields_of(name), *(["max_wait"] if kind.may_wait else [])] for name, kind in ALGORITHMS.items()}


def _trim(form: forms.ModelForm[Any]) -> None:
    """Show decimals without the trailing zeros of the column."""
    for name, value in form.initial.items():
        if isinstance(value, Decimal):
            form.initial[name] = number(value).replace(",", "")


class RuleForm(forms.ModelForm):  # type: ignore[type-arg]
    """A form for a rule. The page's script shows only the fields of the chosen algorithm; `clean` clears the others."""

    class Meta:
        model = Rule
        exclude: list[str] = []  # RuleAdmin.fieldsets names the fields.

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _trim(self)
        algorithm = self.fields.get("algorithm")
        if algorithm is not None:
            algorithm.widget.attrs["data-ratelimits-fields"] = json.dumps(_fields_by_algorithm())


@admin.register(Rule)
class RuleAdmin(AuditedAdmin):
    """Rules, each shown as a sentence."""

    form = RuleForm
    list_display = ["sentence", "name", "plan", "mode", "bills"]
    list_filter = ["mode", "plan", "key_kind", "algorithm", "meter", "bills"]
    list_select_related = ["plan"]
    search_fields = ["name", "scope", "meter", "plan__name"]
    show_facets = admin.ShowFacets.ALWAYS
    readonly_fields = ["reads"]
    save_as = True
    actions = ["enforce", "shadow", "switch_off"]
    fieldsets = [
        (None, {"fields": ["reads", "name", "plan", "mode"]}),
        (_("What it counts"), {"fields": ["scope", "key_kind", "meter", "bills"]}),
        (_("How it counts"), {"fields": ["algorithm", *PARAMETERS, "max_wait"]}),
        (_("When Redis is away"), {"fields": ["on_failure"]}),
        (_("Speed"), {"fields": ["prefetch"]}),
    ]

    class Media:
        js = ["ratelimits/rule_form.js"]

    @admin.display(description=_("rule"), ordering="name")
    def sentence(self, rule: Rule) -> str:
        """Return the rule as a sentence."""
        return rule.sentence()

    @admin.display(description=_("reads as"))
    def reads(self, rule: Rule | None) -> str:
        """Return the sentence of the saved rule; the page's script updates it while values are typed."""
        url = reverse(f"{self.admin_site.name}:ratelimits_rule_preview")
        saved = rule is not None and rule.pk is not None
        return format_html(
            '<output data-ratelimits-preview="{}">{}</output>', url, rule.sentence() if rule and saved else "–"
        )

    def get_urls(self) -> list[URLPattern]:
        preview = path("preview/", self.admin_site.admin_view(self.preview_view), name="ratelimits_rule_preview")
        return [preview, *super().get_urls()]

    def preview_view(self, request: HttpRequest) -> HttpResponse:
        """Return, as JSON, the sentence for the form's values in the query string, or the errors in them."""
        if not (self.has_add_permission(request) or self.has_change_permission(request)):
            raise PermissionDenied
        form = RuleForm(request.GET)
        names = {*PARAMETERS, "algorithm", "max_wait"}
        errors = {name: messages for name, messages in form.errors.items() if name in names}
        if errors:
            return JsonResponse({"errors": errors})
        return JsonResponse({"sentence": form.instance.sentence()})

    @admin.action(description=_("Enforce the selected rules"), permissions=["change"])
    def enforce(self, request: HttpRequest, queryset: QuerySet[Rule]) -> None:
        """Set the rules' mode to enforce, so that they refuse requests."""
        self._set_mode(request, queryset, Rule.Mode.ENFORCE)

    @admin.action(description=_("Let the selected rules only record (shadow mode)"), permissions=["change"])
    def shadow(self, request: HttpRequest, queryset: QuerySet[Rule]) -> None:
        """Set the rules' mode to shadow, so that they only record what they would refuse."""
        self._set_mode(request, queryset, Rule.Mode.SHADOW)

    @admin.action(description=_("Switch the selected rules off"), permissions=["change"])
    def switch_off(self, request: HttpRequest, queryset: QuerySet[Rule]) -> None:
        """Set the rules' mode to off, so that they apply to no request."""
        self._set_mode(request, queryset, Rule.Mode.OFF)

    def _set_mode(self, request: HttpRequest, queryset: QuerySet[Rule], mode: Rule.Mode) -> None:
        rules = list(queryset)
        assert request.user.pk is not None
        count = Rule.objects.filter(pk__in=[rule.pk for rule in rules]).update(mode=mode)
        LogEntry.objects.log_actions(
            request.user.pk, rules, CHANGE, [{"changed": {"fields": ["mode"]}}], single_object=False
        )
        message = ngettext("The mode of %(n)d rule is now %(mode)s.", "The mode of %(n)d rules is now %(mode)s.", count)
        self.message_user(request, message % {"n": count, "mode": mode.value}, messages.SUCCESS)


class KeyOverrideForm(forms.ModelForm):  # type: ignore[type-arg]
    """A form for an override; its rule is chosen from the names of the existing rules."""

    rule = forms.ChoiceField(
        label=_("Rule"), help_text=_("Name of the rule. The override applies in every plan that the key is on.")
    )

    class Meta:
        model = KeyOverride
        exclude: list[str] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _trim(self)
        rule = self.fields.get("rule")
        if isinstance(rule, forms.ChoiceField):
            names = {*Rule.objects.order_by().values_list("name", flat=True), self.instance.rule} - {""}
            rule.choices = [("", "---------"), *((name, name) for name in sorted(names))]


class InForceFilter(admin.SimpleListFilter):
    """Filter for rows whose validity period is now, later or over."""

    title = _("in force")
    parameter_name = "in_force"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, Any]]:
        return [("now", _("now")), ("later", _("later")), ("ended", _("ended"))]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        now = timezone.now()
        if self.value() == "now":
            return queryset.exclude(valid_from__gt=now).exclude(valid_until__lte=now)
        if self.value() == "later":
            return queryset.filter(valid_from__gt=now)
        if self.value() == "ended":
            return queryset.filter(valid_until__lte=now)
        return queryset


@admin.register(KeyOverride)
class KeyOverrideAdmin(AuditedAdmin):
    """Overrides for single keys or accounts."""

    form = KeyOverrideForm
    list_filter = [InForceFilter, "rule", "mode"]
    search_fields = ["key", "rule", "reason"]
    fieldsets = [
        (None, {"fields": ["key", "rule", "reason"]}),
        (_("What differs"), {"fields": [*KeyOverride.NUMBERS, "mode"]}),
        (_("When"), {"fields": ["valid_from", "valid_until"]}),
    ]

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        """Return the columns; the column of numbers reads the rules once for all rows."""
        rules = cache(lambda: readable_rules(conf.DATABASE))

        @admin.display(description=_("what differs"))
        def numbers(override: KeyOverride) -> str:
            reason = override.numbers_error(rules().get(override.rule, ()))
            changes = ", ".join(f"{name} {number(value)}" for name, value in override.changes().items()) or "–"
            return f"{changes} ({_NOT_IN_FORCE % {'error': reason}})" if reason else changes

        return ["key", "rule", numbers, "mode", "valid_from", "valid_until", "reason"]

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Show a warning above the form of an override that is not in force, with the reason."""
        override = kwargs.get("obj")
        if override is not None:
            reason = override.numbers_error(readable_rules(conf.DATABASE).get(override.rule, ()))
            if reason:
                self.message_user(request, _NOT_IN_FORCE % {"error": reason}, messages.WARNING)
        return super().render_change_form(request, context, *args, **kwargs)
