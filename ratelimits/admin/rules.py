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
    """Show decimals as people write them, without the zeros that the column fills up with."""
    for name, value in form.initial.items():
        if isinstance(value, Decimal):
            form.initial[name] = number(value).replace(",", "")


class RuleForm(forms.ModelForm):  # type: ignore[type-arg]
    """A rule; the page's script shows the fields of the chosen algorithm, and without it the others are dropped."""

    class Meta:
        model = Rule
        exclude: list[str] = []  # the page says which

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _trim(self)
        algorithm = self.fields.get("algorithm")
        if algorithm is not None:
            algorithm.widget.attrs["data-ratelimits-fields"] = json.dumps(_fields_by_algorithm())


@admin.register(Rule)
class RuleAdmin(AuditedAdmin):
    """Rules, read as sentences."""

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
        """The rule as a sentence."""
        return rule.sentence()

    @admin.display(description=_("reads as"))
    def reads(self, rule: Rule | None) -> str:
        """The sentence of what is saved; the page's script keeps it up with what is typed."""
        url = reverse(f"{self.admin_site.name}:ratelimits_rule_preview")
        saved = rule is not None and rule.pk is not None
        return format_html(
            '<output data-ratelimits-preview="{}">{}</output>', url, rule.sentence() if rule and saved else "–"
        )

    def get_urls(self) -> list[URLPattern]:
        preview = path("preview/", self.admin_site.admin_view(self.preview_view), name="ratelimits_rule_preview")
        return [preview, *super().get_urls()]

    def preview_view(self, request: HttpRequest) -> HttpResponse:
        """What the form's values, as a query string, would read as, or what is wrong with them."""
        if not (self.has_add_permission(request) or self.has_change_permission(request)):
            raise PermissionDenied
        form = RuleForm(request.GET)
        errors = {name: said for name, said in form.errors.items() if name in {*PARAMETERS, "algorithm", "max_wait"}}
        if errors:
            return JsonResponse({"errors": errors})
        return JsonResponse({"sentence": form.instance.sentence()})

    @admin.action(description=_("Enforce the selected rules"), permissions=["change"])
    def enforce(self, request: HttpRequest, queryset: QuerySet[Rule]) -> None:
        """Refuse what the rules refuse."""
        self._set_mode(request, queryset, Rule.Mode.ENFORCE)

    @admin.action(description=_("Shadow the selected rules: record, never refuse"), permissions=["change"])
    def shadow(self, request: HttpRequest, queryset: QuerySet[Rule]) -> None:
        """Only record what the rules would refuse."""
        self._set_mode(request, queryset, Rule.Mode.SHADOW)

    @admin.action(description=_("Switch the selected rules off"), permissions=["change"])
    def switch_off(self, request: HttpRequest, queryset: QuerySet[Rule]) -> None:
        """Apply the rules to nothing."""
        self._set_mode(request, queryset, Rule.Mode.OFF)

    def _set_mode(self, request: HttpRequest, queryset: QuerySet[Rule], mode: Rule.Mode) -> None:
        rules = list(queryset)
        assert request.user.pk is not None
        count = Rule.objects.filter(pk__in=[rule.pk for rule in rules]).update(mode=mode)
        LogEntry.objects.log_actions(
            request.user.pk, rules, CHANGE, [{"changed": {"fields": ["mode"]}}], single_object=False
        )
        done = ngettext("%(n)d rule is now on %(mode)s.", "%(n)d rules are now on %(mode)s.", count)
        self.message_user(request, done % {"n": count, "mode": mode.value}, messages.SUCCESS)


class KeyOverrideForm(forms.ModelForm):  # type: ignore[type-arg]
    """An override; its rule is chosen by name from those that there are."""

    rule = forms.ChoiceField(label=_("Rule"), help_text=_("Under this name, in whichever plan the key is."))

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
    """Rows with a validity period, by whether it is now."""

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
    """Exceptions for one key or account."""

    form = KeyOverrideForm
    list_filter = [InForceFilter, "rule", "mode"]
    search_fields = ["key", "rule", "reason"]
    fieldsets = [
        (None, {"fields": ["key", "rule", "reason"]}),
        (_("What differs"), {"fields": [*KeyOverride.NUMBERS, "mode"]}),
        (_("When"), {"fields": ["valid_from", "valid_until"]}),
    ]

    def get_list_display(self, request: HttpRequest) -> list[Any]:
        """The columns; the rules are read once for all rows."""
        rules = cache(lambda: readable_rules(conf.DATABASE))

        @admin.display(description=_("what differs"))
        def numbers(override: KeyOverride) -> str:
            reason = override.numbers_error(rules().get(override.rule, ()))
            changes = ", ".join(f"{name} {number(value)}" for name, value in override.changes().items()) or "–"
            return f"{changes} ({_NOT_IN_FORCE % {'error': reason}})" if reason else changes

        return ["key", "rule", numbers, "mode", "valid_from", "valid_until", "reason"]

    def render_change_form(self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Say above the form of an override that it is not in force, and why."""
        override = kwargs.get("obj")
        if override is not None:
            reason = override.numbers_error(readable_rules(conf.DATABASE).get(override.rule, ()))
            if reason:
                self.message_user(request, _NOT_IN_FORCE % {"error": reason}, messages.WARNING)
        return super().render_change_form(request, context, *args, **kwargs)
