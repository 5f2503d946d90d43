"""The tags of the admin's index: common tasks, the status, what floors above add, and the order of the app's tables.

`{% load ratelimits_status %}` loads them. See `templatetags/ratelimits_status.py`.
"""

from __future__ import annotations

import logging
from typing import Any

from django import template
from django.db import DatabaseError
from django.urls import NoReverseMatch, reverse
from django.utils.html import format_html_join
from django.utils.safestring import SafeString
from django.utils.translation import gettext

from ratelimits.admin.status.index import in_order, tasks
from ratelimits.admin.status.page import facts_of_strip
from ratelimits.status.additions import registered
from ratelimits.status.fact import Fact, Level
from ratelimits.templatetags.ratelimits_status import register

logger = logging.getLogger(__name__)


@register.inclusion_tag("ratelimits/admin/status_strip.html", takes_context=True)
def ratelimits_status(context: dict[str, Any]) -> dict[str, Any]:
    """Show each fact of the status in one word, with a link to the status page.

    Show nothing if the user may not view the status, or if the admin site has no status page. If the database fails
    (for example, because the tables do not exist yet), show the error: the rest of the index must still work.
    """
    request = context["request"]
    try:
        url = reverse("admin:ratelimits_status_changelist", current_app=request.current_app)
    except NoReverseMatch:
        return {"facts": [], "url": ""}
    try:
        return {"facts": facts_of_strip(request), "url": url}
    except DatabaseError as error:
        logger.warning("The status could not be read: %s", error)
        title = gettext("Database")
        return {"facts": [Fact("database", title, Level.RED, type(error).__name__, str(error))], "url": url}


@register.inclusion_tag("ratelimits/admin/tasks.html", takes_context=True)
def ratelimits_tasks(context: dict[str, Any]) -> dict[str, Any]:
    """Show a link to each of the most common tasks that the user may do."""
    request = context["request"]
    return {"tasks": tasks(request, request.current_app)}


@register.simple_tag(takes_context=True)
def ratelimits_panels(context: dict[str, Any]) -> SafeString:
    """Show what floors above add to the index."""
    request = context["request"]
    panels = (panel for added in registered for panel in added.index(request, request.current_app))
    return format_html_join("", "{}", ((panel,) for panel in panels))


@register.simple_tag(takes_context=True)
def ratelimits_in_order(context: template.Context) -> str:
    """Put the tables of the app and of the apps above it into the order in which people need them.

    This changes the variable `app_list` for the rest of the template block.
    """
    context["app_list"] = in_order(context["app_list"])
    return ""
