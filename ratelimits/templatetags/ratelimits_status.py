"""The strip of the status above the admin's index, and the order of its tables."""

from __future__ import annotations

from typing import Any

from django import template
from django.db import DatabaseError
from django.urls import NoReverseMatch, reverse

from ratelimits.admin.status.index import in_groups
from ratelimits.admin.status.page import strip

register = template.Library()


@register.inclusion_tag("ratelimits/admin/status_strip.html", takes_context=True)
def ratelimits_status(context: dict[str, Any]) -> dict[str, Any]:
    """Show each fact in one word that links to it on the status page.

    Show nothing to those who may not view the status, on a site without that page, and before the tables exist.
    """
    request = context["request"]
    try:
        url = reverse("admin:ratelimits_status_changelist", current_app=request.current_app)
        return {"facts": strip(request), "url": url}
    except (DatabaseError, NoReverseMatch):
        return {"facts": [], "url": ""}


@register.simple_tag(takes_context=True)
def ratelimits_groups(context: template.Context) -> str:
    """Put the app's tables into groups, in the order of work, for the rest of the block."""
    context["app_list"] = in_groups(context["app_list"])
    return ""
