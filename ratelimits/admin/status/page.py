"""The status page, and the strip with the status above the admin's index, for users who may view the status."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from django.apps import apps
from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext as _

from ratelimits.admin.readonly import ReadOnlyAdmin
from ratelimits.admin.status.charts import bars
from ratelimits.models import Line, Rule, Status
from ratelimits.models.ledger import moment
from ratelimits.status.facts import Fact, facts, worst
from ratelimits.status.usage_over_time import (
    KINDS,
    Dimension,
    Entry,
    Kind,
    UsageOverTime,
    Window,
    last_day,
    last_month,
    usage_over_time,
)

WINDOWS = {"day": last_day, "month": last_month}


@admin.register(Status)
class StatusAdmin(ReadOnlyAdmin):
    """The status page, in place of a list of rows."""

    def get_urls(self) -> list[URLPattern]:
        """Return only the address of this page: there are no pages of single rows."""
        return [path("", self.admin_site.admin_view(self.changelist_view), name="ratelimits_status_changelist")]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the facts, and the usage of the last 24 hours (with `?window=month`, of the last 30 days)."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        chosen = "month" if request.GET.get("window") == "month" else "day"
        window = WINDOWS[chosen](int(time.time()))
        usage = usage_over_time(window, request.GET.get("meter", ""))
        found = facts()
        links = _Links(self.admin_site, request)
        context = {
            **self.admin_site.each_context(request),
            "title": _("Status"),
            "opts": self.model._meta,
            "facts": [(fact, links.to_list(fact.model, fact.query)) for fact in found],
            "worst": worst(found),
            "windows": [
                (name, label, f"?{urlencode({'window': name, 'meter': usage.meter})}#usage", name == chosen)
                for name, label in (("day", _("24 hours")), ("month", _("30 days")))
            ],
            "meters": [
                (meter, f"{count:,}", f"?{urlencode({'window': chosen, 'meter': meter})}#usage", meter == usage.meter)
                for meter, count in usage.meters.items()
            ],
            "kinds": list(_kinds(usage, window, links)),
            "steps": [(_label(window, step.start), *(step.counts[kind] for kind in KINDS)) for step in usage.steps],
            "since": f"{moment(window.start * 1_000_000):%Y-%m-%d %H:%M} UTC",
            **(extra_context or {}),
        }
        return TemplateResponse(request, "ratelimits/admin/status.html", context)


class _Links:
    """The addresses of the site's pages. An address is "" if the user may not open the page."""

    def __init__(self, site: admin.AdminSite, request: HttpRequest) -> None:
        self._site, self._request, self._may = site, request, dict[str, bool]()

    def _may_view(self, model: str) -> bool:
        if model not in self._may:
            known: Any = apps.get_model("ratelimits", model)
            registered = self._site.is_registered(known)
            self._may[model] = registered and self._site.get_model_admin(known).has_view_permission(self._request)
        return self._may[model]

    def to_list(self, model: str, query: Any = None) -> str:
        """Return the address of a model's list with these filters."""
        if not model or not self._may_view(model):
            return ""
        url = reverse(f"{self._site.name}:ratelimits_{model}_changelist")
        return f"{url}?{urlencode(query)}" if query else url

    def to_rule(self, rule: str) -> str:
        """Return the address of a rule."""
        may = self._may_view(Rule._meta.model_name or "")
        return reverse(f"{self._site.name}:ratelimits_rule_change", args=[rule]) if may else ""

    def to_lines(self, account: str, key: str = "") -> str:
        """Return the address of the ledger lines of an account, or of one key of the account."""
        term = f"{account} {key}" if key else account
        return self.to_list(Line._meta.model_name or "", {"q": term}) if account else ""


def _label(window: Window, start: int) -> str:
    return f"{moment(start * 1_000_000):%Y-%m-%d}" if window.step == 86_400 else f"{moment(start * 1_000_000):%H:%M}"


def _kinds(usage: UsageOverTime, window: Window, links: _Links) -> Iterator[dict[str, Any]]:
    """Yield the chart and the lists of each kind of requests, for the template."""
    titles: dict[Kind, str] = {
        "admitted": _("Admitted"),
        "denied": _("Refused"),
        "shadow": _("Shadow-refused"),
        "unmetered": _("Unmetered"),
    }
    lists: dict[Dimension, str] = {"account": _("Accounts"), "key": _("Keys"), "rule": _("Rules")}
    labels = [_label(window, step.start) for step in usage.steps]
    for kind in KINDS:
        values = [step.counts[kind] for step in usage.steps]
        highest = max(values, default=0)
        description = _(
            "%(kind)s: bars from %(first)s to %(last)s, at most %(highest)s; the table below has all numbers"
        )
        about = {"kind": titles[kind], "first": labels[0], "last": labels[-1], "highest": f"{highest:,}"}
        yield {
            "name": kind,
            "title": titles[kind],
            "total": f"{usage.totals[kind]:,}",
            "highest": f"{highest:,}",
            "chart": bars(kind, description % about, values, labels) if highest else "",
            "first": labels[0],
            "last": labels[-1],
            "lists": [
                (title, [_entry(dimension, entry, usage, links) for entry in usage.tops[kind][dimension]])
                for dimension, title in lists.items()
                # No rule decided about unmetered requests.
                if (kind, dimension) != ("unmetered", "rule")
            ],
        }


def _entry(dimension: Dimension, entry: Entry, usage: UsageOverTime, links: _Links) -> dict[str, str]:
    requests = f"{entry.requests:,}"
    if dimension == "rule":
        number = int(entry.name)
        name = usage.rule_names.get(number) or (_("rule %(number)s") % {"number": number} if number else _("no rule"))
        return {"name": name, "url": links.to_rule(entry.name) if number in usage.rule_names else "", "n": requests}
    rule = usage.rule_names.get(entry.rule) or (str(entry.rule) if entry.rule else "")
    by = _("mostly by %(rule)s") % {"rule": rule} if rule else ""
    if dimension == "account":
        return {"name": entry.name or _("anonymous"), "url": links.to_lines(entry.name), "n": requests, "by": by}
    of = [entry.account] if entry.account else []
    return {
        "name": entry.name,
        "url": links.to_lines(entry.account, entry.name),
        "n": requests,
        "by": ", ".join([*of, *([by] if by else [])]),
    }


def strip(request: HttpRequest) -> list[Fact]:
    """Return the facts for the strip above the index; none if the user may not view the status."""
    user: Any = request.user
    may = any(user.has_perm(f"ratelimits.{action}_status") for action in ("view", "change"))
    return facts() if may else []
