"""What the configuration said at a moment or at a version: the terms of an account, a rule as it was then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ratelimits.engine.billing import Span
from ratelimits.models import Account, Plan, PlanInclusion, Rule
from ratelimits.models.kept import kept_of
from ratelimits.reports.periods import Period, period_at, period_from

_NOTHING: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class Terms:
    """How an account is billed: its time zone and anchor, its plan's slug and what that includes, by meter.

    `kept` is the billing period that its last change of zone, anchor or name left as it was, `row` the account's
    primary key, 0 where there is none.
    """

    timezone: str = "UTC"
    anchor: str = ""
    plan: str = ""
    included: Mapping[str, int] = field(default_factory=lambda: _NOTHING)
    kept: Span | None = None
    row: int = 0

    def period(self, at: int) -> Period:
        """Return the billing period around a moment."""
        return period_at(self.timezone, self.anchor, at, self.kept)

    def period_from(self, start: int) -> Period:
        """Return the period that usage was counted under as starting then."""
        return period_from(self.timezone, self.anchor, start, self.kept)


@dataclass(frozen=True, slots=True)
class RuleText:
    """A rule as reports name it; `row` is what it was then (None if nothing is known of it)."""

    name: str
    row: Any = None


def then(model: Any, using: str, at: int, **about: Any) -> Any:
    """Return the newest state of a row at a moment, None if there was none. `about` names it by its own fields."""
    record = model.history.using(using).filter(since__lte=at, **about).order_by("-version", "-history_id").first()
    return None if record is None or record.history_type == "-" else record


class TermsBook:
    """Terms by account, as they are now (`at` None) or were at a moment in µs; plans are remembered."""

    def __init__(self, using: str, at: int | None = None) -> None:
        self._using = using
        self._at = at
        self._plans: dict[int, tuple[str, Mapping[str, int]]] = {}

    def of(self, identifiers: Iterable[str]) -> dict[str, Terms]:
        """Return the terms of these accounts; of one that is not known, those that hold by default."""
        wanted = set(identifiers)
        rows = {row.identifier: row for row in Account.objects.using(self._using).filter(identifier__in=wanted)}
        # Edited since, or no more: the history says what they were.
        past = {name for name in wanted if name not in rows or (self._at is not None and rows[name].since > self._at)}
        then, recorded = self._past(past - {""})
        # A row without any history was written past the models: nothing better is known of it than what it says.
        held = rows | {name: then.get(name, rows.get(name) if name not in recorded else None) for name in past}
        kept = kept_of(self._using, wanted)
        return {name: self._of(row, kept.get(name)) for name, row in held.items()}

    def _past(self, names: set[str]) -> tuple[dict[str, Any], set[str]]:
        """Return the accounts' states at the moment by name, and those that have a history at all.

        The state is None where the account was deleted by then, or had another name.
        """
        if not names:
            return {}, set()
        history: Any = Account.history
        named = history.using(self._using).filter(identifier__in=names)
        recorded = set(named.order_by().values_list("identifier", flat=True).distinct())
        records = history.using(self._using).filter(id__in=named.values("id"))
        if self._at is not None:
            records = records.filter(since__lte=self._at)
        newest = {record.id: record for record in records.order_by("version", "history_id")}
        held = {row.identifier: row for row in newest.values() if row.history_type != "-"}
        return {name: held.get(name) for name in recorded}, recorded

    def _of(self, row: Any, kept: Span | None) -> Terms:
        if row is None:
            return Terms(kept=kept)
        plan, included = self.plan(row.plan_id) if row.plan_id else ("", _NOTHING)
        return Terms(row.timezone, row.billing_anchor or "", plan, included, kept, row.id)

    def plan(self, pk: int) -> tuple[str, Mapping[str, int]]:
        """Return the slug of a plan, and what it includes by meter."""
        if pk not in self._plans:
            self._plans[pk] = self._plan_now(pk) if self._at is None else self._plan_then(pk, self._at)
        return self._plans[pk]

    def _plan_now(self, pk: int) -> tuple[str, Mapping[str, int]]:
        slug = Plan.objects.using(self._using).filter(pk=pk).values_list("slug", flat=True).first() or ""
        rows = PlanInclusion.objects.using(self._using).filter(plan=pk)
        return slug, dict(rows.values_list("meter", "quantity"))

    def _plan_then(self, pk: int, at: int) -> tuple[str, Mapping[str, int]]:
        recorded: Any = Plan.history
        if not recorded.using(self._using).filter(id=pk).exists():
            return self._plan_now(pk)
        plan = then(Plan, self._using, at, id=pk)
        history: Any = PlanInclusion.history
        rows = history.using(self._using).filter(plan_id=pk, since__lte=at).order_by("version", "history_id")
        newest = {row.id: row for row in rows}
        included = {row.meter: row.quantity for row in newest.values() if row.history_type != "-"}
        return plan.slug if plan is not None else "", included


class RuleBook:
    """Rules by primary key and version, as reports name them; what was looked up is remembered."""

    def __init__(self, using: str) -> None:
        self.of = lru_cache(maxsize=10_000)(self._of)
        self._using = using

    def _of(self, rule: int, version: int) -> RuleText:
        if not rule:
            return RuleText("")
        row: Any = Rule.objects.using(self._using).filter(pk=rule, version__lte=version).first()
        if row is None:
            history: Any = Rule.history
            rows = history.using(self._using).filter(id=rule).order_by("-version", "-history_id")
            record = rows.filter(version__lte=version).first() or rows.first()
            row = None if record is None else record.instance
        return RuleText(f"#{rule}") if row is None else RuleText(row.name, row)
