"""The names, sentences and plans of rules at a past moment. A note says if a rule was edited or deleted later."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any, NamedTuple

from django.utils.translation import gettext as _

from ratelimits.conf import conf
from ratelimits.models import Plan, Rule
from ratelimits.moments import moment

#: Maximum number of history records that are read, the newest first.
_MAX_RECORDS = 1_000


class PastRule(NamedTuple):
    """A rule as it was in a span of time.

    name      the name of the rule at that time
    sentence  the rule as a sentence, with its numbers at that time; "" if the numbers are not known
    plan      a text such as " (plan pro)" if the rule belonged to a plan; otherwise ""
    note      says that the rule was edited or deleted later; "" if it was not
    """

    name: str
    sentence: str = ""
    plan: str = ""
    note: str = ""


class _Record(NamedTuple):
    """A record of a rule's history: the state of the rule after an edit.

    pk         the primary key of the record
    edited_at  the moment of the edit
    kind       "+" for a new rule, "~" for an edit of the rule and "-" for its deletion
    plan       the primary key of the rule's plan; None for a default rule
    """

    pk: int
    name: str
    edited_at: datetime
    kind: str
    plan: int | None


class RuleHistories:
    """The histories of some rules. They are read with four queries, for any number of rules.

    The method `at` can be called only for the pairs in `spans`: a rule, and the start of a span in s since 1970 UTC. A
    rule is given by its primary key. 0 means that there is no rule: a block refused the requests.

    current_names  the names of the rules that still exist, by primary key of the rule
    """

    def __init__(self, spans: Collection[tuple[int, int]]) -> None:
        self.current_names: dict[int, str] = {}
        #: The records of each rule, by primary key of the rule.
        self._newest_first: dict[int, list[_Record]] = {}
        #: Former states of rules and their sentences, by primary key of the record.
        self._states: dict[int, Rule] = {}
        self._sentences: dict[int, str] = {}
        #: Slugs of plans, by primary key of the plan.
        self._plans: dict[int, str] = {}
        pks, using = {rule for rule, _start in spans} - {0}, conf.DATABASE
        if not pks:
            return
        self.current_names.update(Rule.objects.using(using).filter(pk__in=pks).values_list("pk", "name"))
        history: Any = Rule.history
        records = history.using(using).filter(id__in=pks).order_by("-history_date", "-history_id")
        columns = "id", "history_id", "name", "history_date", "history_type", "plan"
        for rule, *record in records.values_list(*columns)[:_MAX_RECORDS]:
            self._newest_first.setdefault(rule, []).append(_Record(*record))
        found = (self._record_at(rule, start) for rule, start in spans)
        shown_pks = {record.pk for record in found if record is not None}
        for state in history.using(using).filter(history_id__in=shown_pks):
            self._states[state.history_id] = state.instance
        plans = {state.plan_id for state in self._states.values() if state.plan_id is not None}
        self._plans.update(Plan.objects.using(using).filter(pk__in=plans).values_list("pk", "slug"))

    def _record_at(self, rule: int, start: int) -> _Record | None:
        """Return the newest record from before `start`, or the oldest record if all are later; None without records."""
        records, then = self._newest_first.get(rule, []), moment(start * 1_000_000)
        oldest = records[-1] if records else None
        return next((record for record in records if record.edited_at < then), oldest)

    def at(self, rule: int, start: int, seconds: int) -> PastRule:
        """Return a rule as it was at the start of a span. Without records of the rule, return only its name.

        `start` is in s since 1970 UTC, and `seconds` is the length of the span.
        """
        record = self._record_at(rule, start)
        if record is None:
            name = self.current_names.get(rule) or _("rule %(number)s, which was deleted") % {"number": rule}
            return PastRule(name)
        plan = ""
        if record.plan is not None:
            plan = f" ({_('plan %(plan)s') % {'plan': self._plans.get(record.plan, f'#{record.plan}')}})"
        return PastRule(record.name, self._sentence(record), plan, self._note(rule, record, start, seconds))

    def _sentence(self, record: _Record) -> str:
        """Return the sentence of a former state. Make it only once, because many rows can have the same state."""
        sentence = self._sentences.get(record.pk)
        if sentence is None:
            state = self._states.get(record.pk)
            sentence = "" if state is None or state.unreadable() else state.sentence()
            self._sentences[record.pk] = sentence
        return sentence

    def _note(self, rule: int, shown: _Record, start: int, seconds: int) -> str:
        """Return a text if the rule was edited after the shown record, or deleted; otherwise ""."""
        current_name, end = self.current_names.get(rule), moment((start + seconds) * 1_000_000)
        if current_name is None:
            return _("deleted since")
        if current_name != shown.name:
            return _("edited since; its name is now %(name)s") % {"name": current_name}
        records = self._newest_first[rule]
        later_edits = [
            record.edited_at for record in records if record.kind == "~" and record.edited_at > shown.edited_at
        ]
        if any(edited_at < end for edited_at in later_edits):
            return _("edited in this span of time; these are its numbers from before the edit")
        return _("edited since; these are its numbers of that time") if later_edits else ""
