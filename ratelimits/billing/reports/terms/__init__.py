"""Read the terms of customers at a moment, and rules at a version of the configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ratelimits.billing.reports.terms.account_book import AccountBook
from ratelimits.billing.reports.terms.plan_book import PlanBook
from ratelimits.models import Rule
from ratelimits.models.accounts.named import NamedCustomer
from ratelimits.usage.ledger.terms import Terms

_NOTHING: Mapping[str, int] = {}


@dataclass(frozen=True, slots=True)
class RecordedRule:
    """A rule at a version. `name` is its name for reports; "" if the usage was counted under no rule.

    If nothing is known about the rule, `row` is None, and `name` is "#" and the rule's primary key.
    """

    name: str
    row: Any = None


def record_at(model: Any, using: str, at: int, **filters: Any) -> Any:
    """Return the history record of a row at a moment (µs since 1970 UTC); None if the row did not exist then."""
    record = model.history.using(using).filter(since__lte=at, **filters).order_by("-version", "-history_id").first()
    return None if record is None or record.history_type == "-" else record


class AccountTerms:
    """The terms of some customers, now and at any moment. Each customer and each plan is read only once."""

    def __init__(self, using: str, customers: Iterable[NamedCustomer], plans: PlanBook | None = None) -> None:
        self.accounts = AccountBook(using, customers)
        self.plans = PlanBook(using) if plans is None else plans

    def at(self, customer: NamedCustomer, at: int | None) -> Terms:
        """Return a customer's terms at a moment (µs since 1970 UTC; None means now).

        A customer without an account row has the default terms.
        """
        state, timeline = self.accounts.state(customer, at), self.accounts.timeline(customer)
        if state is None:
            return Terms(timeline=timeline)
        plan, included = self.plans.of(state.plan, at) if state.plan else ("", _NOTHING)
        return Terms(state.timezone, state.anchor, plan, included, timeline)


class RuleBook:
    """Finds rules for reports, by primary key and version. Results are cached."""

    def __init__(self, using: str) -> None:
        self.of = lru_cache(maxsize=10_000)(self._of)
        self._using = using

    def _of(self, rule: int, version: int) -> RecordedRule:
        if not rule:  # The usage was counted under no rule.
            return RecordedRule("")
        row: Any = Rule.objects.using(self._using).filter(pk=rule, version__lte=version).first()
        if row is None:
            history: Any = Rule.history
            rows = history.using(self._using).filter(id=rule).order_by("-version", "-history_id")
            # If all records are newer than this version, nobody knows the name at this version: use the newest name.
            record = rows.filter(version__lte=version).first() or rows.first()
            row = None if record is None else record.instance
        return RecordedRule(f"#{rule}") if row is None else RecordedRule(row.name, row)
