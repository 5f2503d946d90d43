"""The strip of the status above the admin's index."""

from __future__ import annotations

from typing import Any

from django import template
from django.db import DatabaseError
from django.urls import NoReverseMatch, reverse

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
