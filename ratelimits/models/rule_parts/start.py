"""The fields of a rule that say when a key starts with the usage that the ledger has of this key."""

from __future__ import annotations

import time
from typing import Any

from django.db import models
from django.utils.translation import gettext_lazy as _

from ratelimits.algorithms.limits import ALGORITHMS, Lasting, fields_of
from ratelimits.algorithms.windows import BILLING_PERIOD

#: The kinds of keys for which the ledger knows the usage.
_KINDS = {"caller", "user", "api_key", "account"}
#: The units of calendar windows for which the usage is looked up in the ledger.
_UNITS = {"hour", "day", "week", "month", BILLING_PERIOD}
#: The units of calendar windows that are restored by default.
_LONG_UNITS = {"day", "week", "month", BILLING_PERIOD}


def _now() -> int:
    return time.time_ns() // 1000


class Start(models.Model):
    """The part of a rule that says when a key starts with the usage that the ledger has of this key."""

    start_from_ledger = models.BooleanField(
        _("start from the ledger"),
        default=False,
        help_text=_(
            "At its first request in a period, a key starts with the usage that the ledger has of this period, and not"
            " at zero."
        ),
    )

    lasting = models.BooleanField(
        _("outlives Redis"),
        null=True,
        blank=True,
        choices=[
            (None, _("yes, for a calendar window of a day or more that the ledger can restore")),
            (True, _("yes")),
            (False, _("no")),
        ],
        help_text=_(
            "If Redis has lost its data, a key continues with the usage that the ledger has of the present period, and"
            " does not begin at zero."
        ),
    )
    #: The moment since which the rule exists, in µs since 1970 UTC; 0 if it is not known.
    counts_since = models.BigIntegerField(_("counts since"), default=_now, db_default=0, editable=False)

    class Meta:
        abstract = True

    def start_problem(self) -> Any:
        """Return the reason why the rule cannot start from the ledger; "" if it can, or if the option is off."""
        return self._ledger_problem() if self.start_from_ledger else ""

    def lasting_problem(self) -> Any:
        """Return the reason why the ledger cannot restore the rule's counts.

        Return "" if the ledger can restore them, or if `lasting` is not true.
        """
        return self._ledger_problem() if self.lasting else ""

    def restored(self) -> Lasting:
        """Return in which cases a key's count under this rule is restored from the ledger."""
        rule: Any = self
        if (not self.start_from_ledger and self.lasting is False) or self._ledger_problem():
            return Lasting.NO
        if self.start_from_ledger:
            return Lasting.ALWAYS
        return Lasting.LOST if self.lasting or rule.calendar_unit in _LONG_UNITS else Lasting.NO

    def _ledger_problem(self) -> Any:
        """Return the reason why the ledger does not know what the rule has counted; "" if it knows.

        The ledger has no scopes and no addresses. It is searched only for a period of at most a month, or for a billing
        period.
        """
        rule: Any = self
        has_calendar = rule.algorithm in ALGORITHMS and "calendar_unit" in fields_of(rule.algorithm)
        if not has_calendar or rule.calendar_unit not in _UNITS:
            return _(
                "Switch this off, or choose a calendar window of an hour, a day, a week, a month or a billing period."
            )
        if rule.scope != "*" or rule.except_scopes:
            return _("Switch this off, or write * as the scope, without exceptions: the ledger does not know scopes.")
        if rule.key_kind not in _KINDS:
            return _("Switch this off, or count per caller, user, API key or account: the ledger knows no other keys.")
        if rule.prefetch is not None:
            return _(
                "Switch this off, or leave permits per prefetch empty: prefetched permits are added to the ledger too"
                " late."
            )
        return ""
