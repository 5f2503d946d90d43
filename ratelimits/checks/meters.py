"""System checks of the meters that views and rows name. They compare these names with the setting METERS.

A request whose cost names a meter that is not known raises an error (see quota/costs.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseError
from django.db import connections

from ratelimits.checks import listed
from ratelimits.conf import conf
from ratelimits.models import Rule
from ratelimits.models.accounts import plan_parts
from ratelimits.quota.costs import MAX_FURTHER
from ratelimits.unknown_names import written_in_views

#: Maximum number of names that a message lists.
_MOST = 5


@checks.register("ratelimits", checks.Tags.database)
def check_meters(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Warn about rows whose meter METERS lacks. Return an error if requests of views are refused for their meter."""
    try:
        using, declared = conf.DATABASE, conf.METERS
        _scopes, in_views = written_in_views()
    except ImproperlyConfigured:
        return []  # `check_settings` reports the invalid setting.
    if using not in (databases or ()) or using not in connections:
        return []
    try:
        of_rules, of_plans = _by_meter(using)
    except DatabaseError:
        return []  # The tables do not exist yet, or the database is down. Django reports both.
    known = {"requests", *of_rules}
    if declared is None:
        further = sorted(in_views - known - of_plans.keys() - conf.UNITS.keys())
        return list(_too_many(further))
    known.update(declared)
    messages: list[checks.CheckMessage] = list(_undeclared({**of_plans, **of_rules}, {"requests", *declared}))
    refused = [repr(name) for name in sorted(in_views - known)]
    if refused:
        messages.append(
            checks.Error(
                f"Views have a cost on meters that are not known: {listed(refused, _MOST)}.",
                hint="Add them to RATELIMITS['METERS'], or make a rule for them. Until then every request to these"
                " views raises an error.",
                id="ratelimits.E024",
            )
        )
    return messages


def _by_meter(using: str) -> tuple[dict[str, str], dict[str, str]]:
    """Return the meters of rules, and those that plans name. Each has the name of one of its rows."""
    of_rules = {rule.meter: f"rule {rule.pk} ({rule})" for rule in Rule.objects.using(using).order_by("-pk")}
    of_plans = {}
    for part in plan_parts():
        for row in part._default_manager.using(using).select_related("plan").order_by("-pk"):
            of_plans[row.meter] = f"{part._meta.verbose_name_raw} of the plan {row.plan.slug!r}"
    return of_rules, of_plans


def _undeclared(rows: dict[str, str], declared: set[str]) -> Iterator[checks.Warning]:
    for meter in sorted(rows.keys() - declared):
        yield checks.Warning(
            f"RATELIMITS['METERS'] lacks the meter {meter!r}, which this row names: {rows[meter]}.",
            hint="Add the meter to METERS, or correct the row. A cost on a meter that METERS lacks is accepted only"
            " while a rule names this meter.",
            id="ratelimits.W023",
        )


def _too_many(further: Sequence[str]) -> Iterator[checks.Error]:
    if len(further) > MAX_FURTHER:
        yield checks.Error(
            f"Views have a cost on {len(further)} meters that no rule and no plan names:"
            f" {listed([repr(name) for name in further], _MOST)}. A process accepts at most {MAX_FURTHER} such meters.",
            hint="List the meters of the project in RATELIMITS['METERS'].",
            id="ratelimits.E024",
        )
