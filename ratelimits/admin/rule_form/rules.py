"""Rules in the admin."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from ratelimits.admin.audited import AuditedAdmin
from ratelimits.admin.rule_form import starting_points
from ratelimits.admin.rule_form.forms import MAIN_NUMBERS, SavedRuleForm, TriedRuleForm
from ratelimits.admin.rule_form.rule_text import effect, rule_text
from ratelimits.admin.rule_form.trial import trial_of
from ratelimits.admin.suggestions import RowSuggestions
from ratelimits.models import Rule
from ratelimits.models.fields.rule_fields import PARAMETERS
from ratelimits.quota.counting import counting
from ratelimits.status.additions import rule_pages


@admin.register(Rule)
class RuleAdmin(RowSuggestions, AuditedAdmin):
    """Rules, each shown as a sentence."""

    form = SavedRuleForm
    list_display = ["sentence", "name", "plan", "mode", "bills"]
    list_filter = ["mode", "plan", "key_kind", "callers", "algorithm", "meter", "bills"]
    list_select_related = ["plan"]
    autocomplete_fields = ["plan"]
    search_fields = ["name", "scope", "meter", "plan__name"]
    show_facets = admin.ShowFacets.ALWAYS
    readonly_fields = ["reads", "starts", "admits"]
    save_as = True
    actions = ["enforce", "shadow", "switch_off"]
    fieldsets = [
        (None, {"fields": ["reads"], "classes": ["ratelimits-reads"]}),
        (None, {"fields": ["starts", "name", "plan", "mode"]}),
        (_("What it counts"), {"fields": ["scope", "except_scopes", "key_kind", "view_key", "meter", "bills"]}),
        (_("Whose requests it counts"), {"fields": ["callers", "group", "ipv4_prefix", "ipv6_prefix"]}),
        (_("How it counts"), {"fields": ["algorithm", *MAIN_NUMBERS]}),
        (_("Only for some algorithms"), {"fields": [name for name in PARAMETERS if name not in MAIN_NUMBERS]}),
        (_("What it admits"), {"fields": ["admits"]}),
        (_("What a key takes over from the ledger"), {"fields": ["lasting", "start_from_ledger"]}),
        (_("What a refused client receives"), {"fields": ["refusal_status", "refusal_text"]}),
        (_("When Redis does not answer"), {"fields": ["on_failure"]}),
        (_("Speed"), {"fields": ["prefetch"]}),
    ]

    class Media:
        css = {"all": ["ratelimits/rule_form.css"]}
        js = ["ratelimits/rule_form.js"]

    def get_fieldsets(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return the fieldsets.

        Only a new rule has links to starting points. Only users who may save rules see what the rule admits. Only
        projects that count usage have the fields that need the ledger.
        """
        hidden = set() if obj is None else {"starts"}
        if not self.may_try(request):
            hidden.add("admits")
        if not counting.counts:
            hidden |= {"bills", "lasting", "start_from_ledger"}
        fieldsets = []
        for title, options in super().get_fieldsets(request, obj):
            fields = [name for name in options["fields"] if name not in hidden]
            if fields:
                fieldsets.append((title, {**options, "fields": fields}))
        return fieldsets

    def may_try(self, request: HttpRequest) -> bool:
        """Return whether the user may try rules: whoever may save them."""
        return self.has_add_permission(request) or self.has_change_permission(request)

    @admin.display(description=_("rule"), ordering="name")
    def sentence(self, rule: Rule) -> str:
        """Return the rule as a sentence."""
        return rule.sentence()

    @admin.display(description=_("reads as"))
    def reads(self, rule: Rule | None) -> str:
        """Return the sentences of the saved rule. A script of the page changes the sentences while the user types."""
        url = self._url("preview", rule)
        saved = rule_text(rule) if rule is not None and rule.pk is not None else "–"
        return format_html('<output data-ratelimits-preview="{}">{}</output>', url, saved)

    @admin.display(description=_("start from"))
    def starts(self, rule: Rule | None) -> str:
        """Return links that open this form with some fields already filled in."""
        links = starting_points.links(set(Rule.objects.values_list("name", flat=True)))
        return format_html_join(" · ", '<a href="{}" data-ratelimits-start>{}</a>', links)

    @admin.display(description=_("under load"))
    def admits(self, rule: Rule | None) -> str:
        """Return an HTML element in which a script shows the chart, and buttons that open pages.

        The page of the first button has the same chart, for browsers without JavaScript. Floors above add other pages.
        """
        pages = [("trial", _("Show what the rule admits, without saving it"))]
        pages += ((page.name, page.button) for page in rule_pages() if page.button)
        button = '<button type="submit" class="button" formaction="{}" formtarget="_blank" formnovalidate>{}</button>'
        buttons = format_html_join(" ", button, ((self._url(name, rule), text) for name, text in pages))
        url = self._url("trial", rule)
        return format_html('<div data-ratelimits-trial="{}" aria-live="polite"></div>{}', url, buttons)

    def _url(self, name: str, rule: Rule | None) -> str:
        url = reverse(f"{self.admin_site.name}:ratelimits_rule_{name}")
        return url if rule is None or rule.pk is None else f"{url}?rule={rule.pk}"

    def effect_of(self, request: HttpRequest, row: Rule) -> tuple[list[str], list[str]]:
        """Return two lists: sentences about the rule and its keys, and warnings.

        If the rule would refuse everyone, the sentence about its keys is a warning.
        """
        expected = effect(row, row.to_algorithm())
        sentences, warnings = [rule_text(row)], [expected.text] if expected.refuses_everyone else []
        return ([*sentences, expected.text] if expected.text and not warnings else sentences), warnings

    def get_urls(self) -> list[URLPattern]:
        views = [("preview", "preview/", self.preview_view), ("trial", "trial/", self.trial_view)]
        views += ((page.name, page.path, partial(page.view, self)) for page in rule_pages())
        urls = [
            path(route, self.admin_site.admin_view(view), name=f"ratelimits_rule_{name}") for name, route, view in views
        ]
        return [*urls, *super().get_urls()]

    def tried_form(self, request: HttpRequest, values: dict[str, Any] | None = None) -> TriedRuleForm:
        """Return the form with the rule that the user has typed, or with the given values.

        Raise PermissionDenied if the user may not save rules.
        """
        if not self.may_try(request):
            raise PermissionDenied
        pk = request.GET.get("rule", "") if self.has_view_permission(request) else ""
        # A number with 19 digits or more could be too large for the column.
        edited = self.get_queryset(request).filter(pk=int(pk)).first() if pk.isdecimal() and len(pk) < 19 else None
        return TriedRuleForm(values or request.POST or request.GET, instance=edited)

    def preview_view(self, request: HttpRequest) -> HttpResponse:
        """Return, as JSON, the sentences of the typed rule, or the errors in the typed values."""
        rule, errors = self.tried_form(request).typed_rule()
        return JsonResponse({"errors": errors} if rule is None else {"sentence": rule_text(rule)})

    def trial_view(self, request: HttpRequest) -> HttpResponse:
        """Return a page that shows what the typed rule admits, and the number of keys that it applies to.

        With `?fragment=1`, return only the HTML that a script inserts into the form.
        """
        form = self.tried_form(request)
        rule, errors = form.typed_rule()
        context = trial_of(rule, form.errors_with_labels(errors))
        if "fragment" in request.GET:
            return TemplateResponse(request, "ratelimits/admin/rule_trial.html", context)
        context |= {**self.admin_site.each_context(request), "title": _("What a rule admits")}
        context |= {"opts": self.model._meta, "rule_text": rule and rule_text(rule)}
        return TemplateResponse(request, "ratelimits/admin/rule_trial_page.html", context)

    @admin.action(description=_("Enforce the selected rules"), permissions=["change"])
    def enforce(self, request: HttpRequest, queryset: QuerySet[Rule]) -> None:
        """Set the mode of rules to `enforce`, so that the rules refuse requests."""
        self.set_mode(request, queryset, Rule.Mode.ENFORCE)

    @admin.action(description=_("Let the selected rules only record (shadow mode)"), permissions=["change"])
    def shadow(self, request: HttpRequest, queryset: QuerySet[Rule]) -> None:
        """Set the mode of rules to `shadow`, so that the rules only record what they would refuse."""
        self.set_mode(request, queryset, Rule.Mode.SHADOW)

    @admin.action(description=_("Switch the selected rules off"), permissions=["change"])
    def switch_off(self, request: HttpRequest, queryset: QuerySet[Rule]) -> None:
        """Set the mode of rules to `off`, so that the rules apply to no request."""
        self.set_mode(request, queryset, Rule.Mode.OFF)

    def set_mode(self, request: HttpRequest, queryset: QuerySet[Rule], mode: Rule.Mode) -> None:
        """Set the mode of rules, and say so to the user."""
        rules = list(queryset)
        assert request.user.pk is not None
        count = Rule.objects.filter(pk__in=[rule.pk for rule in rules]).update(mode=mode)
        LogEntry.objects.log_actions(
            request.user.pk, rules, CHANGE, [{"changed": {"fields": ["mode"]}}], single_object=False
        )
        message = ngettext("The mode of %(n)d rule is now %(mode)s.", "The mode of %(n)d rules is now %(mode)s.", count)
        self.message_user(request, message % {"n": count, "mode": mode.value}, messages.SUCCESS)
