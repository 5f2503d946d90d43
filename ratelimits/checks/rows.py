"""System checks of the rows in the database, for `manage.py check --database default` and before a migration.

Forms refuse invalid rows, but raw SQL, fixtures and bulk edits do not use forms. Views and rows name meters, too: a
request whose cost names a meter that is not known raises an error (see quota/costs.py).
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from django.apps import AppConfig
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import Error as DatabaseError
from django.db import connections, transaction
from django.db.models import Min, Q

from ratelimits.algorithms.billing_periods import check_terms
from ratelimits.checks import listed
from ratelimits.conf import conf
from ratelimits.engine.program import MAX_LIMITS
from ratelimits.models import Account, KeyOverride, Rule
from ratelimits.models.accounts import plan_parts
from ratelimits.models.overrides import rules_by_name, valid_rules
from ratelimits.models.validation.crowding import too_many
from ratelimits.models.validation.rules import group_problem
from ratelimits.quota.costs import MAX_FURTHER
from ratelimits.quota.counting import counting
from ratelimits.unknown_names import unknown_scopes, written_in_views

#: Maximum number of names that a message lists.
_MOST = 5


@checks.register("ratelimits", checks.Tags.database)
def check_rows(
    app_configs: Sequence[AppConfig] | None, databases: Sequence[str] | None = None, **kwargs: Any
) -> list[checks.CheckMessage]:
    """Return a message for each row that is not in force, and an error if too many rules can apply to one request."""
    try:
        using = conf.DATABASE
    except ImproperlyConfigured:
        return []  # `check_settings` reports the invalid setting.
    if using not in (databases or ()) or using not in connections:
        return []
    try:
        with transaction.atomic(using):
            return [
                *_rules(using),
                *_scopes(using),
                *_groups(using),
                *_overrides(using),
                *_accounts(using),
                *_crowding(using),
                *_uncounted(using),
            ]
    except DatabaseError:
        return []  # The tables do not exist yet, or the database is down. Django reports both.


def _rules(using: str) -> Iterator[checks.CheckMessage]:
    for rule in Rule.objects.using(using).select_related("plan").order_by("pk"):
        reason = rule.unreadable()
        if reason:
            yield checks.Error(
                f"Rule {rule.pk} ({rule}) is not in force: {reason}.",
                hint="Correct or delete the rule in the admin. Until then the rule's failure policy decides.",
                obj=rule,
                id="ratelimits.E020",
            )


def _scopes(using: str) -> Iterator[checks.CheckMessage]:
    """Yield a warning if rules have a scope that no view has. Rules that are off are left out."""
    if not getattr(settings, "ROOT_URLCONF", None):
        return
    rules = list(Rule.objects.using(using).exclude(mode=Rule.Mode.OFF).select_related("plan").order_by("pk"))
    unknown = unknown_scopes(rule.scope for rule in rules)
    named = [f"{rule.scope!r} (rule {rule.pk}, {rule})" for rule in rules if rule.scope in unknown]
    if named:
        yield checks.Warning(
            f"No view has these scopes of rules, so the rules limit nothing: {listed(named)}.",
            hint="Correct the scope of the rule or of the view. If calls to other systems use the scope, add it to"
            " RATELIMITS['OUTBOUND_SCOPES']. If the view is in a module that is not imported at the start, add"
            " 'ratelimits.W052' to SILENCED_SYSTEM_CHECKS.",
            id="ratelimits.W052",
        )


def _groups(using: str) -> Iterator[checks.CheckMessage]:
    """Yield a warning for each rule whose group does not exist (any more). Rules that are off are left out."""
    rules = Rule.objects.using(using).exclude(group="").exclude(mode=Rule.Mode.OFF)
    for rule in rules.select_related("plan").order_by("pk"):
        problem = group_problem(rule.group)
        if problem:
            yield checks.Warning(
                f"Rule {rule.pk} ({rule}) applies to nobody: the group {rule.group!r} does not exist.",
                hint=problem,
                obj=rule,
                id="ratelimits.W021",
            )


def _overrides(using: str) -> Iterator[checks.CheckMessage]:
    """Yield an error for each set of numbers that a rule does not accept.

    Several overrides can have the same numbers. The error names the first of these overrides.
    """
    rules = {name: valid_rules(rows) for name, rows in rules_by_name(using).items()}
    rows = KeyOverride.objects.using(using).order_by().values("rule", *KeyOverride.NUMBERS).annotate(first=Min("pk"))
    for row in rows:
        first, name = row.pop("first"), row["rule"]
        reason = KeyOverride(**row).numbers_error(rules.get(name, ()))
        if reason:
            yield checks.Error(
                f"Override {first} of rule {name} is not in force: {reason}.",
                hint="Correct or delete this override, and every other override with the same numbers. Until then the"
                " rule's failure policy decides the requests of these overrides' keys.",
                id="ratelimits.E021",
            )


def _accounts(using: str) -> Iterator[checks.CheckMessage]:
    """Yield an error for each invalid pair of a time zone and an anchor. It names the first account with this pair."""
    rows = Account.objects.using(using).order_by().values_list("timezone", "billing_anchor").annotate(first=Min("pk"))
    for timezone, anchor, first in rows:
        try:
            check_terms(timezone, anchor, time.time_ns() // 1000)
        except ValueError as error:
            yield checks.Error(
                f"The billing periods of account {first} cannot be computed: {error}.",
                hint="Correct its time zone or billing anchor. Until then its periods are calendar months in UTC, or"
                " start at the quarter of an hour before.",
                id="ratelimits.E022",
            )


def _crowding(using: str) -> Iterator[checks.CheckMessage]:
    """Yield an error if more than MAX_LIMITS rules could apply to one request."""
    crowd = too_many(Rule.objects.using(using), KeyOverride.objects.using(using))
    if crowd is not None:
        switched_on = f" (some are switched on by overrides of {', '.join(crowd.keys)})" if crowd.keys else ""
        yield checks.Error(
            f"{crowd.rules} rules could apply to a request in scope {crowd.scope!r}{switched_on}, but at most"
            f" {MAX_LIMITS} may apply to one request.",
            hint="Switch some rules off, delete them, or give them other scopes. Until then, shadow rules are left out"
            " of the decision first, and then the last enforced rules by name. The failure policy of each enforced rule"
            " that is left out answers instead.",
            id="ratelimits.E023",
        )


def _uncounted(using: str) -> Iterator[checks.CheckMessage]:
    """Yield a warning for rules that need the ledger, in a project that does not count usage."""
    if counting.counts:
        return
    rules = Rule.objects.using(using).filter(Q(bills=True) | Q(start_from_ledger=True) | Q(lasting=True))
    named = [f"rule {rule.pk} ({rule})" for rule in rules.exclude(mode=Rule.Mode.OFF).order_by("pk")]
    if named:
        yield checks.Warning(
            "These rules name usage on reports, or take over counts from the ledger, but nothing counts usage:"
            f" {listed(named)}.",
            hint="Add 'ratelimits.usage' to INSTALLED_APPS. Without it, the rules limit, but if Redis loses its data,"
            " their counts start again.",
            id="ratelimits.W061",
        )


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
