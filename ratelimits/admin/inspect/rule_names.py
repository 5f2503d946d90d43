"""The names that rules had at a moment, and what became of the rules since then."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any, NamedTuple

from django.utils.translation import gettext as _

from ratelimits.conf import conf
from ratelimits.models import Rule
from ratelimits.models.ledger import moment

#: Maximum number of history records that are read, the newest first.
_MAX_RECORDS = 1_000


class _Record(NamedTuple):
    name: str
    at: datetime
    kind: str


class RuleNames:
    """The histories of some rules. They are read with two queries, for any number of rules.

    current    the names of those rules that still exist, by primary key
    plans      a text such as " (plan pro)" for each rule that belongs to a plan, by primary key
    sentences  the present sentence of each rule with its plan, by primary key. A rule that cannot be read has no
               sentence
    """

    def __init__(self, rules: Collection[int]) -> None:
        self.current: dict[int, str] = {}
        self.plans: dict[int, str] = {}
        self.sentences: dict[int, str] = {}
        self._newest_first: dict[int, list[_Record]] = {}
        pks, model = set(rules) - {0}, Rule
        if not pks:
            return
        for row in model.objects.using(conf.DATABASE).filter(pk__in=pks).select_related("plan"):
            self.current[row.pk] = row.name
            if row.plan is not None:
                self.plans[row.pk] = f" ({_('plan %(plan)s') % {'plan': row.plan.slug}})"
            if not row.unreadable():
                self.sentences[row.pk] = row.sentence() + self.plans.get(row.pk, "")
        history: Any = Rule.history
        records = history.using(conf.DATABASE).filter(id__in=pks).order_by("-history_date", "-history_id")
        for pk, *record in records.values_list("id", "name", "history_date", "history_type")[:_MAX_RECORDS]:
            self._newest_first.setdefault(pk, []).append(_Record(*record))

    def at(self, rule: int, start: int) -> tuple[str, str]:
        """Return the name that a rule had at `start` (s since 1970 UTC), and a note about later edits.

        The note is "" if there were none.
        """
        then, current = moment(start * 1_000_000), self.current.get(rule)
        records = self._newest_first.get(rule, [])
        later = [record for record in records if record.at >= then]
        earlier = records[len(later)] if len(later) < len(records) else None
        first_known = earlier or (records[-1] if records else None)
        name = first_known.name if first_known is not None else current
        if name is None:
            return _("rule %(number)s, which was deleted") % {"number": rule}, ""
        if current is None:
            return name, _("deleted since")
        if current != name:
            return name, _("edited since; its name is now %(name)s") % {"name": current}
        return name, _("edited since") if any(record.kind == "~" for record in later) else ""
