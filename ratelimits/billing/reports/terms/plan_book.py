"""Find the quantities that plans include, now or at any moment. Each plan is read only once, with its history."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

from ratelimits.models import Plan, PlanInclusion

#: A plan's slug ("" if the plan does not exist), and the quantities that it includes, by meter.
PlanTerms = tuple[str, Mapping[str, int]]


class _RecordedState(NamedTuple):
    """A recorded state of a plan or of one of its included quantities, from `since` (µs since 1970 UTC) on.

    `row` is the primary key of the row. `kind` is "+" (added), "~" (changed) or "-" (deleted). `text` is the plan's
    slug, or the meter of the included quantity. `quantity` is used only for an included quantity.
    """

    row: int
    since: int
    kind: str
    text: str
    quantity: int = 0


def included_now(using: str) -> Callable[[int], Mapping[str, int]]:
    """Return a function that returns what a plan (its primary key) includes now, by meter. Results are cached."""

    @cache
    def included(plan: int) -> Mapping[str, int]:
        rows = PlanInclusion.objects.using(using).filter(plan=plan)
        return dict(rows.values_list("meter", "quantity"))

    return included


class PlanBook:
    """Finds the terms of plans by primary key. Results are cached."""

    def __init__(self, using: str) -> None:
        self._using = using
        self._included_now = included_now(using)
        self._now = cache(self._read_now)
        self._history = cache(self._read_history)
        self.of = lru_cache(maxsize=1000)(self._of)

    def _of(self, pk: int, at: int | None) -> PlanTerms:
        """Return a plan's terms at a moment (µs since 1970 UTC; None means now)."""
        plans, inclusions = ([], []) if at is None else self._history(pk)
        if at is None or not plans:
            return self._now(pk)
        plan = next((record for record in reversed(plans) if record.since <= at), None)
        # The records are in the order of their edits, so a later record of a row replaces an earlier record.
        newest = {record.row: record for record in inclusions if record.since <= at}
        included = {record.text: record.quantity for record in newest.values() if record.kind != "-"}
        return ("" if plan is None or plan.kind == "-" else plan.text), included

    def _read_now(self, pk: int) -> PlanTerms:
        slug = Plan.objects.using(self._using).filter(pk=pk).values_list("slug", flat=True).first() or ""
        return slug, self._included_now(pk)

    def _read_history(self, pk: int) -> tuple[list[_RecordedState], list[_RecordedState]]:
        columns, order = ("id", "since", "history_type"), ("version", "history_id")
        plans: Any = Plan.history
        plans = plans.using(self._using).filter(id=pk).order_by(*order)
        inclusions: Any = PlanInclusion.history
        inclusions = inclusions.using(self._using).filter(plan_id=pk).order_by(*order)
        return (
            [_RecordedState(*row) for row in plans.values_list(*columns, "slug")],
            [_RecordedState(*row) for row in inclusions.values_list(*columns, "meter", "quantity")],
        )
