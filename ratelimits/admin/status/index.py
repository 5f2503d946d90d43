"""Sort the app's tables on the admin's index in the order of work, not by the alphabet."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

#: The groups and the names of their models, both in the order of the index.
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


def in_groups(app_list: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the apps of the index, with one entry for each group instead of this app's entry.

    A model that is in no group comes last in the first group. A group is left out if the user may see none of its
    models.
    """
    grouped: list[dict[str, Any]] = []
    for app in app_list:
        grouped += _groups(app) if app["app_label"] == "ratelimits" else [app]
    return grouped


def _groups(app: dict[str, Any]) -> list[dict[str, Any]]:
    models = {entry["object_name"]: entry for entry in app["models"]}
    named = {name for _title, names in GROUPS for name in names}
    others = [entry for name, entry in models.items() if name not in named]
    groups = []
    for number, (title, names) in enumerate(GROUPS):
        entries = [models[name] for name in names if name in models] + ([] if number else others)
        if entries:
            name = _("%(app)s: %(group)s") % {"app": app["name"], "group": title}
            groups.append({**app, "name": name, "models": entries})
    return groups
