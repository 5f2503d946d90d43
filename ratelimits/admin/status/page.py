"""The status page, and the strip: a short status above the admin's index."""

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
from ratelimits.conf import conf
from ratelimits.models import Line, Rule, Status
from ratelimits.models.status.totals import DAY
from ratelimits.moments import moment
from ratelimits.status.fact import Fact, worst
from ratelimits.status.facts import before_first_drain, facts
from ratelimits.status.redis_state import RedisReading
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

#: Functions that return a window of time, by the value of `?window=`.
WINDOWS = {"day": last_day, "month": last_month}


@admin.register(Status)
class StatusAdmin(ReadOnlyAdmin):
    """The status page. It replaces Django's list of rows."""

    def get_urls(self) -> list[URLPattern]:
        """Return only the URL of this page. Single rows have no pages."""
        return [path("", self.admin_site.admin_view(self.changelist_view), name="ratelimits_status_changelist")]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show facts about the system, and the usage of the last 24 hours.

        With `?window=month`, show the usage of the last 30 days.
        """
        if not self.has_view_permission(request):
            raise PermissionDenied
        chosen = "month" if request.GET.get("window") == "month" else "day"
        window = WINDOWS[chosen](int(time.time()))
        reading = RedisReading(tries=True)
        usage = usage_over_time(window, request.GET.get("meter", ""))
        all_facts = facts(reading)
        links = _Links(self.admin_site, request)
        context = {
            **self.admin_site.each_context(request),
            "title": _("Status"),
            "opts": self.model._meta,
            "facts": [(fact, links.to_list(fact.model, fact.query)) for fact in all_facts],
            "worst": worst(all_facts),
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
            "nothing_drained": "" if usage.meters else before_first_drain(conf.DATABASE),
            "since": f"{moment(window.start * 1_000_000):%Y-%m-%d %H:%M} UTC",
            **(extra_context or {}),
        }
        return TemplateResponse(request, "ratelimits/admin/status.html", context)


class _Links:
    """Makes URLs of the site's pages. A URL is "" if the user may not open the page."""

    def __init__(self, site: admin.AdminSite, request: HttpRequest) -> None:
        self._site, self._request, self._viewable = site, request, dict[str, bool]()

    def _may_view(self, model: str) -> bool:
        if model not in self._viewable:
            table: Any = apps.get_model("ratelimits", model)
            registered = self._site.is_registered(table)
            page = self._site.get_model_admin(table) if registered else None
            self._viewable[model] = page is not None and page.has_view_permission(self._request)
        return self._viewable[model]

    def to_list(self, model: str, query: Any = None) -> str:
        """Return the URL of the list of a model's rows, with these filters."""
        if not model or not self._may_view(model):
            return ""
        url = reverse(f"{self._site.name}:ratelimits_{model}_changelist")
        return f"{url}?{urlencode(query)}" if query else url

    def to_rule(self, rule: str) -> str:
        """Return the URL of a rule's page."""
        may_view = self._may_view(Rule._meta.model_name or "")
        return reverse(f"{self._site.name}:ratelimits_rule_change", args=[rule]) if may_view else ""

    def to_lines(self, account: str, key: str = "") -> str:
        """Return the URL of the ledger lines of an account, or of one key of the account."""
        term = f"{account} {key}" if key else account
        return self.to_list(Line._meta.model_name or "", {"q": term}) if account else ""


def _label(window: Window, start: int) -> str:
    """Return the label of a step: its day, or its time of the day."""
    return f"{moment(start * 1_000_000):%Y-%m-%d}" if window.step == DAY else f"{moment(start * 1_000_000):%H:%M}"


def _kinds(usage: UsageOverTime, window: Window, links: _Links) -> Iterator[dict[str, Any]]:
    """Yield the template's values for each kind of requests: a chart, and lists of accounts, keys and rules."""
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
            "%(kind)s: bars from %(first)s to %(last)s. The highest bar is %(highest)s. A table below has all numbers."
        )
        values_of_description = {
            "kind": titles[kind],
            "first": labels[0],
            "last": labels[-1],
            "highest": f"{highest:,}",
        }
        yield {
            "name": kind,
            "title": titles[kind],
            "url": links.to_list("shadow") if kind == "shadow" else "",
            "total": f"{usage.totals[kind]:,}",
            "highest": f"{highest:,}",
            "chart": bars(kind, description % values_of_description, values, labels) if highest else "",
            "first": labels[0],
            "last": labels[-1],
            "lists": [
                (title, [_entry(dimension, entry, usage, links) for entry in usage.tops[kind][dimension]])
                for dimension, title in lists.items()
                # No rule decided about unmetered requests, so there is no list of rules for them.
                if (kind, dimension) != ("unmetered", "rule")
            ],
        }


def _entry(dimension: Dimension, entry: Entry, usage: UsageOverTime, links: _Links) -> dict[str, str]:
    """Return the texts of an entry. `details` has the account of a key, and the rule that refused most requests."""
    requests = f"{entry.requests:,}"
    if dimension == "rule":
        number = int(entry.name)
        name = usage.rule_names.get(number) or (_("rule %(number)s") % {"number": number} if number else _("no rule"))
        return {
            "name": name,
            "url": links.to_rule(entry.name) if number in usage.rule_names else "",
            "requests": requests,
        }
    rule = usage.rule_names.get(entry.rule) or (str(entry.rule) if entry.rule else "")
    by = _("mostly by %(rule)s") % {"rule": rule} if rule else ""
    if dimension == "account":
        return {
            "name": entry.name or _("anonymous"),
            "url": links.to_lines(entry.name),
            "requests": requests,
            "details": by,
        }
    return {
        "name": entry.name,
        "url": links.to_lines(entry.account, entry.name),
        "requests": requests,
        "details": ", ".join(filter(None, (entry.account, by))),
    }


def facts_of_strip(request: HttpRequest) -> list[Fact]:
    """Return the facts for the strip above the index; an empty list if the user may not view the status."""
    user: Any = request.user
    may_view = user.has_perm("ratelimits.view_status")
    return facts() if may_view else []
