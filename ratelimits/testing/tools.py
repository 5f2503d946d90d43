"""The three tools for tests of a project: other rules, a stopped clock, and no limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal, InvalidOperation
from difflib import get_close_matches
from typing import Any

from django.conf import settings
from django.core.exceptions import ValidationError
from django.test.utils import TestContextDecorator, override_settings

from ratelimits import rules
from ratelimits.algorithms import typed_rates
from ratelimits.algorithms.base import MICROSECONDS
from ratelimits.algorithms.limits import DEFAULT_ALGORITHM, with_numbers
from ratelimits.engine.clock import clock
from ratelimits.models.accounts import Plan
from ratelimits.models.rules import Rule
from ratelimits.quota import from_memory, without_decision
from ratelimits.rules import groups
from ratelimits.rules.rows import Rows, RuleRow, rule_row
from ratelimits.testing.preparing import enter_namespace

#: Primary keys of the rules of tests begin here, so that no row of the database has the same primary key.
_FIRST_PK = 1_000_000_000
#: The primary key that a rule of a test gets as its plan if the plan does not exist.
_NO_PLAN = -1
_EXAMPLE = '{"name": "burst", "capacity": 10, "rate": "10/min"}'
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class override_rules(TestContextDecorator):  # noqa: N801  (it is used as a decorator, like Django's override_settings)
    """Decide by these rules instead of the database's rules.

    A rule is a dict with the fields of the model `Rule`, or an unsaved `Rule`. `rate` can be a typed rate such as
    "10/5min". It then also sets the period and the capacity, if the dict does not have them. `plan` is the slug of a
    plan. Plans, memberships, groups, accounts, overrides, blocks and allows still come from the database.

    All permits are unspent at the beginning. Raise ValueError for a rule that is not valid.
    """

    def __init__(
        self,
        rules: Iterable[Mapping[str, Any] | Rule] = (),
        *,
        attr_name: str | None = None,
        kwarg_name: str | None = None,
    ) -> None:
        super().__init__(attr_name=attr_name, kwarg_name=kwarg_name)
        self._rows = [_row(position, rule) for position, rule in enumerate(rules)]
        #: For each use that has begun and not ended: the function that ends this use.
        self._ends: list[Callable[[], None]] = []

    def enable(self) -> None:
        leave = enter_namespace()
        previous = rules.replace_rules(_TestRules(self._rows))
        # The rules of the test can name groups. So changes of groups must be noted, even if no rule in the
        # database names a group.
        had_rules_outside_database = groups.has_rules_outside_database
        groups.has_rules_outside_database = True

        def end() -> None:
            groups.has_rules_outside_database = had_rules_outside_database
            rules.replace_rules(previous)
            leave()

        self._ends.append(end)

    def disable(self) -> None:
        self._ends.pop()()


class _TestRules:
    """Replaces the rules among the rows of the database with the rules of a test."""

    def __init__(self, rule_rows: list[tuple[RuleRow, str]]) -> None:
        #: Each rule of the test, with the slug of its plan.
        self._rule_rows = rule_rows
        #: The result of the last call. The loader passes it to the next call if no row has changed.
        self._last: Rows | None = None

    def __call__(self, rows: Rows) -> Rows:
        if rows is self._last:
            return rows
        plan_pks = {slug: pk for pk, slug in rows.plans.items()}
        rule_rows = (replace(row, plan=plan_pks.get(slug, _NO_PLAN)) if slug else row for row, slug in self._rule_rows)
        self._last = replace(rows, rules={row.pk: row for row in rule_rows}, deleted_at={})
        return self._last


def _row(position: int, rule: Mapping[str, Any] | Rule) -> tuple[RuleRow, str]:
    """Return a rule as a row, and the slug of its plan ("" if it has no plan). `position` decides its primary key."""
    if not isinstance(rule, (Mapping, Rule)):
        raise ValueError(
            f"Rule {position + 1} is {rule!r}: write a list of rules, each a dict such as {_EXAMPLE} or an unsaved Rule"
        )
    plan: Any = ""
    name = rule.name if isinstance(rule, Rule) else str(rule.get("name", f"rule-{position + 1}"))
    try:
        if isinstance(rule, Rule):
            made, plan = rule, rule.plan or ""
        else:
            values = {"name": name, **rule}
            plan = values.pop("plan", None) or ""
            if not isinstance(plan, (str, Plan)):
                raise ValueError(f"plan must be the slug of a plan, such as 'pro', not {plan!r}")
            _check_fields(values)
            made = Rule(**_numbers(values))
        made.clean_fields(exclude=["id", "plan"])
        if reason := made.unreadable():
            raise ValueError(reason)
    except ValidationError as error:
        texts = [f"{field}: {text}" for field, all_texts in error.message_dict.items() for text in all_texts]
        raise ValueError(f"The rule {name!r} is not valid: {'; '.join(texts)}") from error
    except ValueError as error:
        raise ValueError(f"The rule {name!r} is not valid: {error}") from error
    row = replace(rule_row(made), pk=_FIRST_PK + position, plan=0, version=1, edited_at=0)
    return row, plan if isinstance(plan, str) else plan.slug


def _check_fields(values: Mapping[str, Any]) -> None:
    """Raise ValueError for a field that rules do not have, and for a value that a field's choices do not contain."""
    fields = {
        field.name: field
        for field in Rule._meta.fields
        if field.editable and not field.primary_key and not field.is_relation
    }
    for name, value in values.items():
        if name not in fields:
            similar = get_close_matches(str(name), fields, n=1)
            hint = f"do you mean {similar[0]!r}?" if similar else f"write one of {', '.join(fields)}"
            raise ValueError(f"a rule has no field {name!r}: {hint}")
        choices = [choice for choice, _label in fields[name].flatchoices]
        if choices and value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {value!r}")


def _numbers(values: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a rule. Typed rates and typed lengths of time become numbers (lengths: in seconds)."""
    values = with_numbers({"algorithm": DEFAULT_ALGORITHM, **values})
    rate = values.get("rate")
    if isinstance(rate, str) and not _is_number(rate):
        typed_rates.rate(rate)  # For a text that is not a rate, this raises an error with an example.
    for name in ("period", "max_wait", "lease_ttl"):
        if isinstance(values.get(name), str):
            values[name] = typed_rates.seconds(values[name])
    return values


def _is_number(text: str) -> bool:
    try:
        return Decimal(text).is_finite()
    except InvalidOperation:
        return False


class FrozenClock:
    """The stopped clock of all decisions. It moves only by `tick` and `move_to`, and by requests that wait."""

    @property
    def now(self) -> datetime:
        """Return the time of the next decision, in UTC."""
        return _EPOCH + timedelta(microseconds=clock.now())

    def tick(self, seconds: float | timedelta = 1) -> datetime:
        """Move the clock forward by a number of seconds or a timedelta, and return the new time.

        Raise ValueError if the number is negative, because the clock moves only forward.
        """
        delta = seconds if isinstance(seconds, timedelta) else timedelta(seconds=seconds)
        if delta < timedelta(0):
            raise ValueError(f"the clock moves only forward, not by {delta.total_seconds():g} s")
        clock.advance(delta // timedelta(microseconds=1))
        return self.now

    def move_to(self, moment: datetime) -> datetime:
        """Move the clock forward to a moment, and return the moment. Raise ValueError for an earlier moment."""
        return self.tick(_aware(moment) - self.now)


class frozen_quota_clock(TestContextDecorator):  # noqa: N801  (it is used as a decorator)
    """Stop the time of all decisions, by default at the present moment. `with` gives the FrozenClock.

    The throttle classes, the middleware, the decorator and `check` use this time for decisions and headers. The
    time also decides which overrides, memberships, blocks and allows are valid. A request that has to wait moves the
    clock and does not sleep. A decorated function receives the clock in the argument with the name `kwarg_name`. A
    decorated class has the clock in the attribute with the name `attr_name`.

    All permits are unspent at the beginning. The tasks that write the ledger and the reports use the real time.
    """

    def __init__(
        self, at: datetime | None = None, *, attr_name: str | None = None, kwarg_name: str | None = None
    ) -> None:
        super().__init__(attr_name=attr_name, kwarg_name=kwarg_name)
        self._at = _aware(at) if at is not None else None
        #: For each use that has begun and not ended: the function that ends this use.
        self._ends: list[Callable[[], None]] = []

    def __enter__(self) -> FrozenClock:  # type: ignore[override]  # django-stubs types this only for override_settings
        return self.enable()

    def enable(self) -> FrozenClock:
        leave = enter_namespace()
        previous = clock.frozen
        self._set(clock.now() if self._at is None else (self._at - _EPOCH) // timedelta(microseconds=1))

        def end() -> None:
            self._set(previous)
            leave()

        self._ends.append(end)
        return FrozenClock()

    def disable(self) -> None:
        self._ends.pop()()

    @staticmethod
    def _set(moment: int | None) -> None:
        """Stop the clock at a moment (µs since 1970 UTC). If `moment` is None, let the clock run.

        Forget the refusals in memory and the fallback's counts, because their times are times of the former clock.
        """
        clock.frozen = moment
        rules.use_clock(None if moment is None else clock.now)
        from_memory.denials.clear()
        from_memory.denials.clock = without_decision.local.clock = (
            time.monotonic if moment is None else lambda: clock.now() / MICROSECONDS
        )
        without_decision.local.clear()


def _aware(moment: datetime) -> datetime:
    if moment.tzinfo is None:
        raise ValueError(f"{moment} has no time zone: write for example datetime(2026, 11, 23, tzinfo=UTC)")
    return moment


class no_rate_limits(TestContextDecorator):  # noqa: N801  (it is used as a decorator)
    """Let every request pass, and count nothing: the setting ENABLED is False."""

    def __init__(self) -> None:
        super().__init__()
        self._changes: list[override_settings] = []

    def enable(self) -> None:
        project_settings: dict[str, Any] = getattr(settings, "RATELIMITS", {})
        change = override_settings(RATELIMITS={**project_settings, "ENABLED": False})
        change.enable()
        self._changes.append(change)

    def disable(self) -> None:
        self._changes.pop().disable()
