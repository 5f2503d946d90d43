"""The overrides of a key that are in force now or begin later. A grant is such an override."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from django.contrib.admin import AdminSite
from django.http import HttpRequest
from django.urls import reverse
from django.utils.translation import gettext as _

from ratelimits import moments
from ratelimits.admin.operate.chosen_key import may_view
from ratelimits.admin.operate.confirming import may_operate
from ratelimits.admin.typed import local_time
from ratelimits.algorithms.base import number
from ratelimits.conf import conf
from ratelimits.models import KeyOverride

#: Maximum number of overrides that are listed.
MAX_OVERRIDES = 20


class RunningOverride(NamedTuple):
    """An override as a page lists it. `url` is the page of the override; "" if the user may not open it."""

    text: str
    url: str


def override_text(row: KeyOverride) -> str:
    """Return what an override changes, such as "capacity 400, shadow"."""
    changes = [f"{name} {number(value)}" for name, value in row.changes().items()]
    if row.mode:
        changes.append(row.get_mode_display())
    return ", ".join(changes) or "–"


def running_overrides(request: HttpRequest, site: AdminSite, keys: Collection[str | None]) -> list[RunningOverride]:
    """Return the overrides of these keys that have not ended, at most `MAX_OVERRIDES`. This takes one query.

    Users who may view overrides see all values. Users who may only block and reset keys do not see the reasons. All
    other users see nothing.
    """
    may_view_overrides = may_view(request, site, KeyOverride)
    if not may_view_overrides and not may_operate(request):
        return []
    now = moments.now()
    rows = KeyOverride.objects.using(conf.DATABASE).filter(key__in=[key for key in keys if key])
    rows = rows.exclude(valid_until__lte=now).order_by("rule", "valid_from", "pk")
    page = f"{site.name}:ratelimits_keyoverride_change"
    running = []
    for row in rows[:MAX_OVERRIDES]:
        parts = [f"{row}: {override_text(row)}"]
        if row.valid_from is not None and row.valid_from > now:
            parts.append(_("from %s") % local_time(row.valid_from))
        parts.append(_("without an end") if row.valid_until is None else _("until %s") % local_time(row.valid_until))
        text = ", ".join(parts) + (f" ({row.reason})" if row.reason and may_view_overrides else "")
        running.append(RunningOverride(text, reverse(page, args=[row.pk]) if may_view_overrides else ""))
    return running
