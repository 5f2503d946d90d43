"""The field of a rule that says with how much usage a key starts."""

from __future__ import annotations

from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from ratelimits.algorithms.limits import ALGORITHMS, fields_of

#: The kinds of keys and the units of calendar windows whose usage the ledger can tell.
_KINDS, _UNITS = {"user", "api_key", "account", "key"}, {"hour", "day", "week", "month"}


class Start(models.Model):
    """The part of a rule that says with how much usage a key starts."""

    start_from_ledger = models.BooleanField(
        _("start from the ledger"),
        default=False,
        help_text=_(
            "At its first request in a period, a key starts with the usage that the ledger has of this period, and not"
            " at zero."
        ),
    )

    class Meta:
        abstract = True

    def start_problem(self) -> Any:
        """Return the reason why the rule cannot start from the ledger; "" if it can, or if the option is off.

        The ledger has no scopes and no addresses. It is searched only for a period of at most a month.
        """
        rule: Any = self
        if not self.start_from_ledger:
            return ""
        has_calendar = rule.algorithm in ALGORITHMS and "calendar_unit" in fields_of(rule.algorithm)
        if not has_calendar or rule.calendar_unit not in _UNITS:
            return _("Untick this, or choose a calendar window of an hour, a day, a week or a month.")
        if rule.scope != "*" or rule.except_scopes:
            return _("Untick this, or write * as the scope, without exceptions: the ledger does not know scopes.")
        if rule.key_kind not in _KINDS:
            return _("Untick this, or count per user, API key, account or key: the ledger knows no other keys.")
        if rule.prefetch is not None:
            return _("Untick this, or leave permits per prefetch empty: prefetched permits are not in the ledger.")
        return ""
