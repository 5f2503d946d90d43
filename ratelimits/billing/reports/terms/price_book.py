"""Find the prices of plans at a moment, in the form in which reports record prices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache, lru_cache
from typing import Any

from ratelimits.billing.models import PlanPrice
from ratelimits.billing.reports.terms import record_at
from ratelimits.models import Plan
from ratelimits.money import minor_digits

#: The prices of a plan in the form in which reports record them: the plan, the currency, the currency's number of
#: decimals, and for each meter the price with its id and version.
RecordedPrices = Mapping[str, Any]

#: The currency of a plan without prices, and its number of decimals.
_NO_CURRENCY = ("", 0)


class PriceBook:
    """Finds the prices of plans at any moment. Results are cached."""

    def __init__(self, using: str) -> None:
        self._using = using
        self._current = cache(self._read_current)
        self._recorded = cache(self._read_recorded)
        self.of = lru_cache(maxsize=1000)(self._of)

    def _of(self, slug: str, at: int) -> RecordedPrices:
        """Return the prices of the plan with this slug at a moment (µs since 1970 UTC); {} if the plan has no prices.

        Raise ValueError if the currency or a price is invalid and was not corrected later. Only raw SQL can write an
        invalid value.
        """
        plan = self._plan(slug, at) if slug else None
        if plan is None:
            return {}
        try:
            _row, currency_and_digits = self._first_valid(Plan, plan, _currency)
            currency, digits = currency_and_digits or _NO_CURRENCY
        except ValueError as error:
            raise ValueError(f"the currency of plan {slug} is not valid: {error}") from error
        if not currency:
            return {}
        meters = {}
        for stored in sorted(self._rows(plan.id, at), key=lambda row: row.meter):
            try:
                row, price = self._first_valid(PlanPrice, stored, PlanPrice.price)
            except ValueError as error:
                raise ValueError(f"the price of {stored.meter} in plan {slug} is not valid: {error}") from error
            if row is not None:
                meters[row.meter] = {"id": row.id, "version": row.version, **price.record()}
        if not meters:
            return {}
        return {"plan": slug, "currency": currency, "digits": digits, "meters": meters}

    def _first_valid(self, model: Any, row: Any, read: Callable[[Any], Any]) -> tuple[Any, Any]:
        """Return a row, and the result of `read` for this row.

        Raw SQL can write an invalid row. If the row is invalid, return its first valid correction with the result, or
        (None, None) if the row was deleted. Raise ValueError if the row was not corrected yet.
        """
        try:
            return row, read(row)
        except ValueError:
            later = model.history.using(self._using).filter(id=row.id, version__gt=row.version)
            for record in later.order_by("version", "history_id"):
                if record.history_type == "-":
                    return None, None
                with suppress(ValueError):
                    return record, read(record)
            raise

    def _plan(self, slug: str, at: int) -> Any:
        """Return a plan, or its history record, as it was at a moment; None if the plan did not exist then."""
        current = self._current(slug)
        if current is not None and current.since <= at:
            return current
        past = record_at(Plan, self._using, at, slug=slug)
        history: Any = Plan.history
        if past is None and current is not None:
            # If no record says that the plan was added, raw SQL wrote the plan. Then its first record is used.
            first = history.using(self._using).filter(id=current.pk).order_by("version", "history_id").first()
            if first is None or first.history_type != "+":
                return first or current
        return past

    def _read_current(self, slug: str) -> Any:
        return Plan.objects.using(self._using).filter(slug=slug).first()

    def _rows(self, plan: int, at: int) -> list[Any]:
        """Return the prices of a plan, or their history records, as they were at a moment."""
        rows, records = self._recorded(plan)
        first_records = {record.id: record for record in reversed(records)}
        # If the first record of a row does not say that the row was added, the row existed before this record. Then the
        # values of this record are used for earlier moments too.
        states = {
            pk: record for pk, record in first_records.items() if record.history_type != "+" and record.since > at
        }
        for record in records:
            if record.since <= at:
                states.pop(record.id, None)
                if record.history_type != "-":
                    states[record.id] = record
        # Raw SQL wrote the rows that have no record.
        unrecorded = [row for row in rows if row.pk not in first_records]
        return [row for row in (*unrecorded, *states.values()) if row.plan_id == plan]

    def _read_recorded(self, plan: int) -> tuple[list[Any], list[Any]]:
        """Return a plan's current prices, and the history records of all its prices in the order of the edits."""
        history: Any = PlanPrice.history
        of_plan = history.using(self._using).filter(plan_id=plan)
        records = history.using(self._using).filter(id__in=of_plan.values("id")).order_by("version", "history_id")
        return list(PlanPrice.objects.using(self._using).filter(plan=plan)), list(records)


def _currency(plan: Any) -> tuple[str, int]:
    """Return a plan's currency and its number of decimals. Raise ValueError for an unknown currency."""
    return (plan.currency, minor_digits(plan.currency)) if plan.currency else _NO_CURRENCY
