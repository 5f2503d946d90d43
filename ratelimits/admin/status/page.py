"""The status page, and the strip: a short status above the admin's index. Floors above add panels."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import URLPattern, path, reverse
from django.utils.translation import gettext as _

from ratelimits.admin.operate.chosen_key import list_url
from ratelimits.admin.readonly import ReadOnlyAdmin
from ratelimits.models import Rule, Status
from ratelimits.routers import own_apps
from ratelimits.status.additions import registered
from ratelimits.status.fact import Fact, worst
from ratelimits.status.facts import facts
from ratelimits.status.redis_state import RedisReading


@admin.register(Status)
class StatusAdmin(ReadOnlyAdmin):
    """The status page. It replaces Django's list of rows."""

    def get_urls(self) -> list[URLPattern]:
        """Return only the URL of this page. Single rows have no pages."""
        return [path("", self.admin_site.admin_view(self.changelist_view), name="ratelimits_status_changelist")]

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show facts about the system, and what floors above add."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        reading = RedisReading(tries=True)
        panels = [panel for added in registered for panel in added.status(request, self.admin_site)]
        all_facts = facts(reading)
        links = Links(self.admin_site, request)
        context = {
            **self.admin_site.each_context(request),
            "title": _("Status"),
            "opts": self.model._meta,
            "facts": [(fact, links.to_list(fact.model, fact.query)) for fact in all_facts],
            "worst": worst(all_facts),
            "panels": panels,
            **(extra_context or {}),
        }
        return TemplateResponse(request, "ratelimits/admin/status.html", context)


class Links:
    """Makes URLs of the site's pages. A URL is "" if the user may not open the page."""

    def __init__(self, site: admin.AdminSite, request: HttpRequest) -> None:
        self._site, self._request, self._viewable = site, request, dict[str, bool]()

    def _may_view(self, model: str) -> bool:
        if model not in self._viewable:
            table = _table(model)
            registered = self._site.is_registered(table)
            page = self._site.get_model_admin(table) if registered else None
            self._viewable[model] = page is not None and page.has_view_permission(self._request)
        return self._viewable[model]

    def to_list(self, model: str, query: Any = None) -> str:
        """Return the URL of the list of a model's rows, with these filters."""
        if not model or not self._may_view(model):
            return ""
        return list_url(self._site, _table(model), query or {})

    def to_rule(self, rule: str) -> str:
        """Return the URL of a rule's page."""
        may_view = self._may_view(Rule._meta.model_name or "")
        return reverse(f"{self._site.name}:ratelimits_rule_change", args=[rule]) if may_view else ""


def _table(name: str) -> type[Model]:
    """Return a table of the installed apps of this package. Raise StopIteration if none has it."""
    model: type[Model] = next(config.models[name] for config in own_apps() if name in config.models)
    return model


def facts_of_strip(request: HttpRequest) -> list[Fact]:
    """Return the facts for the strip above the index; an empty list if the user may not view the status."""
    user: Any = request.user
    may_view = user.has_perm("ratelimits.view_status")
    return facts() if may_view else []
