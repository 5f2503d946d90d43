"""The admin's index: links to the most common tasks, and the app's tables in the order in which people use them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ratelimits.admin.inspected import may_inspect
from ratelimits.admin.operate.confirming import may_operate
from ratelimits.status.additions import rule_pages

#: The groups of the index, each with the names of its models. Groups and models are in the order of the index.
GROUPS: tuple[tuple[Any, tuple[str, ...]], ...] = (
    (
        gettext_lazy("Operate"),
        (
            *("Status", "Shadow", "Inspect", "Access", "KeyReset", "QuarantinedBatch", "DurabilityGap"),
            *("Alert", "AlertDelivery", "PushReceiver", "PushDelivery"),
        ),
    ),
    (gettext_lazy("Configure"), ("Rule", "Plan", "PlanMembership", "KeyOverride", "Account", "AlertChannel", "Change")),
    (gettext_lazy("Bill"), ("Report", "ReportLine", "Adjustment", "PeriodUsage")),
    (gettext_lazy("Evidence"), ("Line", "Batch", "ShardState", "ArchivedRange")),
)


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


def in_groups(app_list: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of the index. In place of the entry of this app, there is an entry for each group.

    A model without a group comes last in the first group. If the user may see no model of a group, the group is left
    out.
    """
    entries: list[dict[str, Any]] = []
    for app in app_list:
        entries += _groups(app) if app["app_label"] == "ratelimits" else [app]
    return entries


def _groups(app: dict[str, Any]) -> list[dict[str, Any]]:
    models = {entry["object_name"]: entry for entry in app["models"]}
    names_in_groups = {name for _title, names in GROUPS for name in names}
    without_group = [entry for name, entry in models.items() if name not in names_in_groups]
    groups = []
    for number, (title, names) in enumerate(GROUPS):
        entries = [models[name] for name in names if name in models]
        if number == 0:
            entries += without_group
        if entries:
            name = _("%(app)s: %(group)s") % {"app": app["name"], "group": title}
            groups.append({**app, "name": name, "models": entries})
    return groups
