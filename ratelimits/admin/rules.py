"""Rules in the admin."""

from __future__ import annotations

from typing import Any

from django.contrib import admin, messages
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.html import format_html, format_html_join
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from ratelimits.admin.audited import AuditedAdmin
from ratelimits.admin.inspected import inspect_url, may_inspect
from ratelimits.admin.rule_form import starting_points
from ratelimits.admin.rule_form.affected import affected
from ratelimits.admin.rule_form.enforcing import enforcing
from ratelimits.admin.rule_form.forms import MAIN_NUMBERS, SavedRuleForm, TriedRuleForm
from ratelimits.admin.rule_form.quick_try import QuickTryForm
from ratelimits.admin.rule_form.rule_text import rule_text
from ratelimits.admin.rule_form.trial import trial_of
from ratelimits.admin.rule_form.yesterday import yesterday
from ratelimits.admin.suggestions import RowSuggestions
from ratelimits.models import Rule
from ratelimits.models.fields.rule_fields import PARAMETERS
from ratelimits.status.keys import searched_name


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

        Only a new rule has links to starting points. Only users who may save rules see what the rule admits.
        """
        hidden = set() if obj is None else {"starts"}
        if not self._may_try(request):
            hidden.add("admits")
        fieldsets = []
        for title, options in super().get_fieldsets(request, obj):
            fields = [name for name in options["fields"] if name not in hidden]
            if fields:
                fieldsets.append((title, {**options, "fields": fields}))
        return fieldsets

    def _may_try(self, request: HttpRequest) -> bool:
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
        """Return an HTML element in which a script shows the chart, and two buttons that open pages.

        The page of the first button has the same chart, for browsers without JavaScript. The page of the second button
        replays recorded requests.
        """
        return format_html(
            '<div data-ratelimits-trial="{0}" aria-live="polite"></div><button type="submit" class="button"'
            ' formaction="{0}" formtarget="_blank" formnovalidate>{1}</button> <button type="submit" class="button"'
            ' formaction="{2}" formtarget="_blank" formnovalidate>{3}</button>',
            self._url("trial", rule),
            _("Show what the rule admits, without saving it"),
            self._url("yesterday", rule),
            _("Try the rule on the requests of the last 24 hours, without saving it"),
        )

    def _url(self, name: str, rule: Rule | None) -> str:
        url = reverse(f"{self.admin_site.name}:ratelimits_rule_{name}")
        return url if rule is None or rule.pk is None else f"{url}?rule={rule.pk}"

    def effect_of(self, request: HttpRequest, row: Rule) -> tuple[list[str], list[str]]:
        """Return two lists: sentences about the rule and its keys, and warnings.

        If the rule would refuse everyone, the sentence about its keys is a warning.
        """
        keys = affected(row, row.to_algorithm())
        if keys.refuses_everyone:
            return [rule_text(row)], [keys.text]
        return [rule_text(row), keys.text], []

    def get_urls(self) -> list[URLPattern]:
        views = (("preview", self.preview_view), ("trial", self.trial_view), ("yesterday", self.yesterday_view))
        urls = [
            path(f"{name}/", self.admin_site.admin_view(view), name=f"ratelimits_rule_{name}") for name, view in views
        ]
        enforce = self.admin_site.admin_view(self.enforce_view)
        urls.append(path("<path:object_id>/enforce/", enforce, name="ratelimits_rule_enforce"))
        return [*urls, *super().get_urls()]

    def _tried_form(self, request: HttpRequest, values: dict[str, Any] | None = None) -> TriedRuleForm:
        """Return the form with the rule that the user has typed, or with the given values.

        Raise PermissionDenied if the user may not save rules.
        """
        if not self._may_try(request):
            raise PermissionDenied
        pk = request.GET.get("rule", "") if self.has_view_permission(request) else ""
        # A number with 19 digits or more could be too large for the column.
        edited = self.get_queryset(request).filter(pk=int(pk)).first() if pk.isdecimal() and len(pk) < 19 else None
        return TriedRuleForm(values or request.POST or request.GET, instance=edited)

    def preview_view(self, request: HttpRequest) -> HttpResponse:
        """Return, as JSON, the sentences of the typed rule, or the errors in the typed values."""
        rule, errors = self._tried_form(request).typed_rule()
        return JsonResponse({"errors": errors} if rule is None else {"sentence": rule_text(rule)})

    def trial_view(self, request: HttpRequest) -> HttpResponse:
        """Return a page that shows what the typed rule admits, and the number of keys that it applies to.

        With `?fragment=1`, return only the HTML that a script inserts into the form.
        """
        form = self._tried_form(request)
        rule, errors = form.typed_rule()
        context = trial_of(rule, form.errors_with_labels(errors))
        if "fragment" in request.GET:
            return TemplateResponse(request, "ratelimits/admin/rule_trial.html", context)
        context |= {**self.admin_site.each_context(request), "title": _("What a rule admits")}
        context |= {"opts": self.model._meta, "rule_text": rule and rule_text(rule)}
        return TemplateResponse(request, "ratelimits/admin/rule_trial_page.html", context)

    def yesterday_view(self, request: HttpRequest) -> HttpResponse:
        """Return a page that shows what the typed rule would have decided about the requests of the last 24 hours.

        Only recorded requests are known. Without a typed rule, the page asks for a limit.
        """
        short_form = None if request.POST else QuickTryForm(request.GET if "limit" in request.GET else None)
        context: dict[str, Any] = {"short_form": short_form}
        rule = None
        if short_form is None or short_form.is_valid():
            form = self._tried_form(request, None if short_form is None else short_form.rule_values())
            rule, errors = form.typed_rule()
            context["errors"] = form.errors_with_labels(errors)
        elif not self._may_try(request):
            raise PermissionDenied
        if rule is not None:
            context |= self._yesterday_of(request, rule)
            if short_form is not None and self.has_add_permission(request):
                add = reverse(f"{self.admin_site.name}:ratelimits_rule_add")
                context["add_url"] = add + short_form.rule_query(rule)
        title = _("Would a limit have refused anyone in the last 24 hours?")
        context |= {**self.admin_site.each_context(request), "title": title}
        if rule is not None and short_form is not None:
            rule.name = ""  # The name is from the short form. The user has not typed it.
        context |= {"opts": self.model._meta, "rule_text": rule and rule_text(rule)}
        return TemplateResponse(request, "ratelimits/admin/rule_yesterday.html", context)

    def _yesterday_of(self, request: HttpRequest, rule: Rule) -> dict[str, Any]:
        saved = self.get_queryset(request).filter(pk=rule.pk).first()
        user: Any = request.user
        context = yesterday(rule, saved, with_keys=user.has_perm("ratelimits.view_line"))
        has_links, site = may_inspect(request), self.admin_site.name
        context["keys"] = [
            (
                row,
                inspect_url(row.key, site=site) if has_links and ":" in row.key else "",
                searched_name(row.key) if has_links and row.key.startswith("api_key:") else "",
            )
            for row in context.get("keys", ())
        ]
        return context

    def enforce_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show whose requests a rule would have refused. If the user confirms, set the rule's mode to `enforce`."""
        if not self.has_change_permission(request):
            raise PermissionDenied
        rule = self.get_object(request, unquote(object_id))
        if rule is None:
            raise Http404
        rows = self.get_queryset(request).filter(pk=rule.pk)
        return enforcing(request, self.admin_site, rule, lambda: self._set_mode(request, rows, Rule.Mode.ENFORCE))

    @admin.action(description=_("Enforce the selected rules"), permissions=["change"])
    def enforce(self, request: HttpRequest, queryset: QuerySet[Rule]) -> None:
        """Set the mode of rules to `enforce`, so that the rules refuse requests."""
        self._set_mode(request, queryset, Rule.Mode.ENFORCE)

    @admin.action(description=_("Let the selected rules only record (shadow mode)"), permissions=["change"])
    def shadow(self, request: HttpRequest, queryset: QuerySet[Rule]) -> None:
        """Set the mode of rules to `shadow`, so that the rules only record what they would refuse."""
        self._set_mode(request, queryset, Rule.Mode.SHADOW)

    @admin.action(description=_("Switch the selected rules off"), permissions=["change"])
    def switch_off(self, request: HttpRequest, queryset: QuerySet[Rule]) -> None:
        """Set the mode of rules to `off`, so that the rules apply to no request."""
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
