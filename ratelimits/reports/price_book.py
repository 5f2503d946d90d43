"""What plans charged at a moment, as reports record it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from ratelimits.models import Plan, PlanPrice
from ratelimits.pricing.money import minor_digits
from ratelimits.pricing.prices import Price
from ratelimits.reports.terms import then

#: A plan's prices as a report records them: plan, currency, its digits, and by meter the price and where it is from.
Record = Mapping[str, Any]


class PriceBook:
    """The prices of plans, as they are now or were at a moment; what was looked up is remembered."""

    def __init__(self, using: str) -> None:
        self._using = using
        self.of = lru_cache(maxsize=1000)(self._of)

    def _of(self, slug: str, at: int | None) -> Record:
        """Return what the plan of this slug charged at a moment in µs since 1970 UTC, or charges now; {} for nothing.

        Raises ValueError for a price that makes no sense: it was written past the models.
        """
        plan = self._plan(slug, at) if slug else None
        if plan is None or not plan.currency:
            return {}
        meters = {}
        for row in sorted(self._rows(plan.id, at), key=lambda row: row.meter):
            try:
                price: Price = PlanPrice.price(row)
            except ValueError as error:
                raise ValueError(f"the price of {row.meter} in plan {slug} makes no sense: {error}") from error
            meters[row.meter] = {"id": row.id, "version": row.version, **price.record()}
        if not meters:
            return {}
        return {"plan": slug, "currency": plan.currency, "digits": minor_digits(plan.currency), "meters": meters}

    def _plan(self, slug: str, at: int | None) -> Any:
        now = Plan.objects.using(self._using).filter(slug=slug).first()
        if at is None or (now is not None and now.since <= at):
            return now
        past = then(Plan, self._using, at, slug=slug)
        history: Any = Plan.history
        if past is None and now is not None and not history.using(self._using).filter(id=now.pk).exists():
            return now  # written past the models: nothing better is known of it
        return past

    def _rows(self, plan: int, at: int | None) -> list[Any]:
        rows = {row.pk: row for row in PlanPrice.objects.using(self._using).filter(plan=plan)}
        if at is None:
            return list(rows.values())
        history: Any = PlanPrice.history
        records = history.using(self._using).filter(plan_id=plan).order_by("version", "history_id")
        newest: dict[int, Any] = {row.pk: row for row in rows.values()}
        for pk in {record.id for record in records}:
            newest.pop(pk, None)
        newest |= {record.id: record for record in records if record.since <= at}
        return [row for row in newest.values() if getattr(row, "history_type", "") != "-"]
