"""The shadow page: the requests that rules in shadow mode would have refused in the last 24 hours, by key."""

from __future__ import annotations

import time
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ratelimits.admin.inspected import inspect_url, may_inspect
from ratelimits.admin.readonly import ReadOnlyAdmin
from ratelimits.admin.status.usage import bars
from ratelimits.models import Rule, Shadow
from ratelimits.moments import moment
from ratelimits.status.refusals import MAX_RULES, ShadowRule, hours_until, shadow_refusals


def may_see_shadow(request: HttpRequest) -> bool:
    """Return whether the user may open the shadow page."""
    user: Any = request.user
    return bool(user.has_perm("ratelimits.view_shadow"))


def shadow_summary(shadow_rule: ShadowRule) -> str:
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
        return [path("", self.admin_site.admin_view(self.changelist_view), name="ratelimits_shadow_changelist")]

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
            "summary": shadow_summary(shadow_rule),
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
