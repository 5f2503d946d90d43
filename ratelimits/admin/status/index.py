"""The admin's index: links to the most common tasks, and the app's tables in the order in which people use them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext as _

from ratelimits.admin.inspected import may_inspect
from ratelimits.admin.operate.confirming import may_operate
from ratelimits.routers import is_own, own_apps
from ratelimits.status.additions import rule_pages


def tasks(request: HttpRequest, site: str) -> list[tuple[str, str]]:
    """Return the most common tasks that the user may do, each with the URL of its page.

    `site` is the name of the admin site. A task whose page the site does not have is left out.
    """
    user: Any = request.user
    may_try = any(user.has_perm(f"ratelimits.{action}_rule") for action in ("add", "change"))
    all_tasks = (
        (_("Why was a request refused?"), "inspect_changelist", "", may_inspect(request)),
        (_("Give more"), "access_grant", "", may_operate(request)),
        (_("Reset a key"), "keyreset_add", "", may_operate(request)),
        (_("Block somebody"), "access_add", "?effect=block", may_operate(request)),
        *((page.task, f"rule_{page.name}", "", may_try) for page in rule_pages() if page.task),
    )
    links = []
    for text, name, query, may in all_tasks:
        with suppress(NoReverseMatch):
            if may:
                links.append((text, reverse(f"{site}:ratelimits_{name}") + query))
    return links


def in_order(app_list: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of the index, with the apps of this package side by side, and their tables in order of work.

    `pages` of an app's config names its tables in this order. A table that it does not name comes last.
    """
    own = {entry["app_label"]: entry for entry in app_list if is_own(entry["app_label"])}
    ours = [_in_order(own[config.label], config.pages) for config in own_apps() if config.label in own]
    entries: list[dict[str, Any]] = []
    for entry in app_list:
        if entry["app_label"] not in own:
            entries.append(entry)
        elif ours:
            entries, ours = [*entries, *ours], []
    return entries


def _in_order(app: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    place = {name: number for number, name in enumerate(names)}
    return {**app, "models": sorted(app["models"], key=lambda entry: place.get(entry["object_name"], len(place)))}
