"""The tags of the admin's index: common tasks, the status, recent refusals, and the order of the app's tables.

`{% load ratelimits_status %}` loads them. See `templatetags/ratelimits_status.py`.
"""

from __future__ import annotations

import logging
from typing import Any

from django import template
from django.db import DatabaseError
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext

from ratelimits.admin.status.index import in_groups, recent_refusals, tasks
from ratelimits.admin.status.page import facts_of_strip
from ratelimits.conf import conf
from ratelimits.status.fact import Fact, Level
from ratelimits.status.facts import before_first_drain
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


@register.inclusion_tag("ratelimits/admin/recent_refusals.html", takes_context=True)
def ratelimits_refusals(context: dict[str, Any]) -> dict[str, Any]:
    """List the newest refusals, if the user may see them and the admin site has an inspector.

    Before the first drain, show instead a text that says what to start. If the database fails, show nothing: the status
    strip shows the error.
    """
    request, text = context["request"], ""
    try:
        refusals = recent_refusals(request, request.current_app)
        if refusals == []:  # None would mean that the user may not see refusals.
            text = before_first_drain(conf.DATABASE)
    except (NoReverseMatch, DatabaseError) as error:
        logger.warning("The recent refusals could not be read: %s", error)
        refusals = None
    return {"shown": refusals is not None, "refusals": refusals, "nothing_drained": text}


@register.simple_tag(takes_context=True)
def ratelimits_groups(context: template.Context) -> str:
    """Put the app's tables into groups, in the order in which people need the tables.

    This changes the variable `app_list` for the rest of the template block.
    """
    context["app_list"] = in_groups(context["app_list"])
    return ""
