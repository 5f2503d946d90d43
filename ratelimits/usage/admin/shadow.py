"""The shadow page: whose requests shadow rules would have refused in 24 hours. A second page enforces such a rule."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import copy
from typing import Any

from django import forms
from django.contrib import admin, messages
from django.contrib.admin import AdminSite
from django.contrib.admin.utils import unquote
from django.core.exceptions import PermissionDenied
from django.db import router, transaction
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ratelimits.admin.audited import ReasonForm, recorded_user
from ratelimits.admin.inspected import inspect_url, may_inspect
from ratelimits.admin.operate.confirming import Consequences, confirmation, is_confirmed
from ratelimits.admin.readonly import ReadOnlyAdmin
from ratelimits.admin.rule_form.rules import RuleAdmin
from ratelimits.models import Rule
from ratelimits.models.versions import editing
from ratelimits.moments import moment
from ratelimits.usage.admin.affected import affected
from ratelimits.usage.admin.charts import bars
from ratelimits.usage.models import Shadow
from ratelimits.usage.status.refusals import MAX_RULES, ShadowRule, hours_until, shadow_refusals


def _may_see_shadow(request: HttpRequest) -> bool:
    """Return whether the user may open the shadow page."""
    user: Any = request.user
    return bool(user.has_perm("ratelimits_usage.view_shadow"))


def _shadow_summary(shadow_rule: ShadowRule) -> str:
    """Return a sentence with the number of requests that the rule would have refused."""
    if not shadow_rule.total:
        return _("The rule would have refused nobody in the last 24 hours.")
    requests = ngettext("%(n)s request", "%(n)s requests", shadow_rule.total) % {"n": f"{shadow_rule.total:,}"}
    keys = ngettext("%(n)s key", "%(n)s keys", shadow_rule.key_count) % {"n": f"{shadow_rule.key_count:,}"}
    return _("The rule would have refused %(requests)s of %(keys)s in the last 24 hours.") % {
        "requests": requests,
        "keys": keys,
    }


@admin.register(Shadow)
class ShadowAdmin(ReadOnlyAdmin):
    """The shadow page. It replaces the list of the model's rows."""

    def get_urls(self) -> list[URLPattern]:
        """Return only the URL of this page, because single rows have no pages."""
        return [path("", self.admin_site.admin_view(self.changelist_view), name="ratelimits_usage_shadow_changelist")]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show each rule with a chart by hour, and with the keys that have the most shadow refusals."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        now = time.time()
        labels = [f"{moment(start * 1_000_000):%H:%M}" for start in hours_until(now)]
        rules = shadow_refusals(now)
        context = {
            **self.admin_site.each_context(request),
            "title": _("Shadow refusals"),
            "opts": self.model._meta,
            "rules": [self._rule_context(request, shadow_rule, labels) for shadow_rule in rules],
            "more": len(rules) >= MAX_RULES,
            "max_rules": MAX_RULES,
            **(extra_context or {}),
        }
        return TemplateResponse(request, "ratelimits/admin/shadow.html", context)

    def _rule_context(self, request: HttpRequest, shadow_rule: ShadowRule, labels: list[str]) -> dict[str, Any]:
        rule, site = shadow_rule.rule, self.admin_site.name
        user: Any = request.user
        may_change = user.has_perm("ratelimits.change_rule")
        may_view = may_change or user.has_perm("ratelimits.view_rule")
        values = {"rule": rule, "first": labels[0], "last": labels[-1], "highest": f"{max(shadow_rule.hours):,}"}
        description = _("%(rule)s: bars from %(first)s to %(last)s, at most %(highest)s in an hour") % values
        return {
            "name": str(rule),
            "sentence": rule.sentence(),
            "mode": "" if rule.mode == Rule.Mode.SHADOW else rule.get_mode_display(),
            "url": reverse(f"{site}:ratelimits_rule_change", args=[rule.pk]) if may_view else "",
            "enforce_url": (
                reverse(f"{site}:ratelimits_rule_enforce", args=[rule.pk])
                if may_change and rule.mode == Rule.Mode.SHADOW
                else ""
            ),
            "summary": _shadow_summary(shadow_rule),
            "chart": bars("shadow", description, shadow_rule.hours, labels) if shadow_rule.total else "",
            "first": labels[0],
            "last": labels[-1],
            "highest": f"{max(shadow_rule.hours):,}",
            "hours": list(zip(labels, shadow_rule.hours, strict=True)),
            "keys": [
                (row, inspect_url(row.key, row.account, site) if may_inspect(request) and ":" in row.key else "")
                for row in shadow_rule.keys
            ],
            "more_keys": shadow_rule.key_count - len(shadow_rule.keys),
        }


def enforce_page(page: RuleAdmin, request: HttpRequest, object_id: str) -> HttpResponse:
    """Show whose requests a rule would have refused. If the user confirms, set the rule's mode to `enforce`."""
    if not page.has_change_permission(request):
        raise PermissionDenied
    rule = page.get_object(request, unquote(object_id))
    if rule is None:
        raise Http404
    rows = page.get_queryset(request).filter(pk=rule.pk)
    return _enforcing(request, page.admin_site, rule, lambda: page.set_mode(request, rows, Rule.Mode.ENFORCE))


class _ConfirmForm(ReasonForm):
    """A form that asks for the reason of the change. `version` is the version of the rule that the page has shown."""

    version = forms.CharField(required=False, widget=forms.HiddenInput)


def _enforcing(request: HttpRequest, site: AdminSite, rule: Rule, enforce: Callable[[], None]) -> HttpResponse:
    """Show whose requests the rule would have refused. After the user has confirmed, call `enforce`.

    If the rule was edited after the page was shown, show the page again. The caller must check that the user may change
    the rule.
    """
    page = "ratelimits_usage_shadow" if _may_see_shadow(request) else "ratelimits_rule"
    back = reverse(f"{site.name}:{page}_changelist")
    if rule.mode == Rule.Mode.ENFORCE:
        messages.warning(request, _("The rule %(rule)s is already enforced.") % {"rule": rule})
        return HttpResponseRedirect(back)
    form = _ConfirmForm(request.POST if is_confirmed(request) else None, initial={"version": rule.version})
    if is_confirmed(request) and form.is_valid():
        with recorded_user(request):
            if _enforced(rule, form.cleaned_data["version"], enforce):
                return HttpResponseRedirect(back)
        messages.warning(request, _("The rule was edited after the page was shown. Look at the rule again."))
        return HttpResponseRedirect(request.path)
    return confirmation(request, site, Rule._meta, _consequences(request, rule), back, form=form)


def _enforced(rule: Rule, version: str, enforce: Callable[[], None]) -> bool:
    """Call `enforce` and return True. If the rule no longer has this version, change nothing and return False."""
    using = router.db_for_write(Rule)
    with editing(using):
        # In this block, nobody else can edit the rule.
        current_version = Rule.objects.using(using).filter(pk=rule.pk).values_list("version", flat=True).first()
        if str(current_version) != version:
            transaction.set_rollback(True, using=using)
            return False
        enforce()
    return True


def _consequences(request: HttpRequest, rule: Rule) -> Consequences:
    title = _("Enforce %(rule)s") % {"rule": rule}
    if rule.unreadable():
        return Consequences(title, [], [rule.sentence()])
    (shadow_rule,) = shadow_refusals(time.time(), rule)
    enforced = copy(rule)
    enforced.mode = Rule.Mode.ENFORCE
    affected_keys = affected(enforced, rule.to_algorithm())
    sentences = [
        f"{rule.sentence()}.",
        _("From the next request on, the rule refuses requests above its limit."),
        _shadow_summary(shadow_rule),
    ]
    user: Any = request.user
    may_see_keys = _may_see_shadow(request) or user.has_perm("ratelimits_usage.view_line")
    rows = [(key.key, key.account or "–", f"{key.requests:,}") for key in shadow_rule.keys] if may_see_keys else []
    heads = [_("key"), _("account"), _("requests that the rule would have refused")]
    warnings: list[str] = []
    if affected_keys.refuses_everyone:
        warnings.append(affected_keys.text)
    else:
        sentences.append(affected_keys.text)
    return Consequences(title, sentences, warnings, heads, rows)
