"""The admin's index: links to the most common tasks, and the app's tables in the order in which people use them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from django.http import HttpRequest
from django.urls import NoReverseMatch, reverse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy, ngettext

from ratelimits.admin.inspected import inspect_url, may_inspect, may_view_lines
from ratelimits.admin.operate.confirming import may_operate
from ratelimits.conf import conf
from ratelimits.models import Rule
from ratelimits.models.status.totals import QUARTER
from ratelimits.moments import moment
from ratelimits.status.keys import typed_key
from ratelimits.status.refusals import newest_refusals

#: Maximum number of refusals that the index lists.
MAX_REFUSALS = 5

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
        (_("Would a limit have refused anyone in the last 24 hours?"), "rule_yesterday", "", may_try),
    )
    links = []
    for text, name, query, may in all_tasks:
        with suppress(NoReverseMatch):
            if may:
                links.append((text, reverse(f"{site}:ratelimits_{name}") + query))
    return links


def _refusing_name(rule: int, names: Mapping[int, str]) -> str:
    """Return the name of the rule that refused; "a block" for the number 0, which stands for blocks in the totals."""
    if not rule:
        return _("a block")
    return names.get(rule) or _("rule %(number)s") % {"number": rule}


class RecentRefusal(NamedTuple):
    """A line about the refusals of a key. `url` is the inspector's page about the key; "" if there is no such page."""

    text: str
    url: str


def recent_refusals(request: HttpRequest, site: str) -> list[RecentRefusal] | None:
    """Return lines about the newest refusals, at most `MAX_REFUSALS`. This makes two queries.

    Return None if the user may not see them. `site` is the name of the admin site.
    """
    if not (may_inspect(request) and may_view_lines(request)):
        return None
    rows = newest_refusals(time.time(), MAX_REFUSALS)
    names = dict(Rule.objects.using(conf.DATABASE).filter(pk__in={row.rule for row in rows}).values_list("pk", "name"))
    refusals = []
    for row in rows:
        start = moment(row.start * 1_000_000)
        requests = ngettext("%(n)s request", "%(n)s requests", row.denied) % {"n": f"{row.denied:,}"}
        text = _("%(time)s UTC: %(rule)s refused %(requests)s of %(key)s") % {
            "time": f"{start:%H:%M}–{moment((row.start + QUARTER) * 1_000_000):%H:%M}",
            "requests": requests,
            "key": f"{row.key} ({row.account})" if row.account else row.key,
            "rule": _refusing_name(row.rule, names),
        }
        # The inspector has no page for a text that is not a key. It shows no refusals of a key without an account.
        has_page = row.account and typed_key(row.key) == row.key
        url = inspect_url(row.key, row.account, site) if has_page else ""
        refusals.append(RecentRefusal(text, url))
    return refusals


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
