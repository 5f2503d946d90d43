"""What the configuration said at a moment or at a version: the terms of an account, a rule as it was then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from ratelimits.algorithms.billing_periods import Span
from ratelimits.models import Rule
from ratelimits.reports.periods import Period, period_at, period_from
from ratelimits.reports.terms.account_book import AccountBook
from ratelimits.reports.terms.plan_book import PlanBook

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


class AccountTerms:
    """The terms of some accounts, as they are now and at any moment; what they share is read once."""

    def __init__(self, using: str, names: Iterable[str], plans: PlanBook | None = None) -> None:
        self.accounts = AccountBook(using, names)
        self.plans = PlanBook(using) if plans is None else plans

    def at(self, name: str, at: int | None) -> Terms:
        """Return an account's terms at a moment in µs since 1970 UTC, or now; those by default if it is not known."""
        state, kept = self.accounts.state(name, at), self.accounts.kept(name)
        if state is None:
            return Terms(kept=kept)
        plan, included = self.plans.of(state.plan, at) if state.plan else ("", _NOTHING)
        return Terms(state.timezone, state.anchor, plan, included, kept, state.row)


class TermsBook:
    """Terms by account, as they are now; plans are remembered."""

    def __init__(self, using: str) -> None:
        self._using, self._plans = using, PlanBook(using)

    def of(self, identifiers: Iterable[str]) -> dict[str, Terms]:
        """Return the terms of these accounts; of one that is not known, those that hold by default."""
        names = set(identifiers)
        terms = AccountTerms(self._using, names, self._plans)
        return {name: terms.at(name, None) for name in names}


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
