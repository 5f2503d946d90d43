"""Choose the rules that apply to an identity, and give them the numbers of its overrides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ratelimits.algorithms.billing_periods import PeriodTerms
from ratelimits.algorithms.limits import Mode
from ratelimits.conf import conf
from ratelimits.models.keys import COUNTED
from ratelimits.rules.keyed import OverrideRow
from ratelimits.rules.narrowing import USER, applies_to_caller, counted_kind, covers, needs_unreadable, overridden
from ratelimits.rules.rows import Rows, RuleRow
from ratelimits.rules.selection import GLOBAL_KEY, AppliedRule, UnreadableRule

#: The properties of an identity on which its rules depend. The items are: a bit for each kind of key that it has; the
#: plan of its key; the plan of its account; the moment when a row about one of its keys last changed, or 0 if this was
#: longer ago than RECENT (in facts.py); the overrides of its keys; the groups of its user that are named by a rule; the
#: digests of the sources of its view keys; the terms of its account's billing periods, or None if no rule follows them;
#: and the number of its account's customer in the names of limits (see `Name.counter`). A plan is given by its id; 0
#: means no plan.
Properties = tuple[
    int, int, int, int, tuple[OverrideRow, ...], frozenset[str], tuple[str, ...], PeriodTerms | None, int
]
_NO_GROUPS: frozenset[str] = frozenset()


class Chooser:
    """Chooses the rules of one version that apply to an identity.

    clock     returns the present moment, in µs since 1970 UTC
    seen      is called with the present moment and the next moment at which a rule's numbers change
    log_once  logs an error about the rows, if this error was not logged before
    """

    __slots__ = ("_clock", "_log_once", "_plans", "_rows", "_seen")

    def __init__(
        self, rows: Rows, clock: Callable[[], int], seen: Callable[[int, int], None], log_once: Callable[[str], None]
    ) -> None:
        self._rows = rows
        self._clock = clock
        self._seen = seen
        self._log_once = log_once
        self._plans: dict[int, dict[str, RuleRow]] = {}
        for row in rows.rules.values():
            self._plans.setdefault(row.plan, {})[row.name] = row

    def possible(
        self, scope: str, method: str, present: int, sources: tuple[str, ...]
    ) -> list[AppliedRule | UnreadableRule]:
        """Return every enforced rule, of every plan, that can apply to a request, without overrides.

        `present` has a bit for each kind of key that the request has. `sources` are as in `Properties`.
        """
        found: list[AppliedRule | UnreadableRule] = []
        for row in self._rows.rules.values():
            kind = counted_kind(row, present, sources)
            # The groups of the user are not known here. So assume that the user is in the group of the rule.
            groups = frozenset({row.group}) if present & USER else _NO_GROUPS
            if row.mode != "enforce" or not covers(row, scope, method):
                continue
            if needs_unreadable(row, present):
                found.append(UnreadableRule(row.name, row.pk, row.meter, row.on_failure or conf.FAILURE_POLICY))
                continue
            if not applies_to_caller(row, present, groups):
                continue
            if kind is None and row.key_kind in COUNTED:  # See `chosen`.
                continue
            rule = self._apply(row, kind or GLOBAL_KEY, overrides=[], deletions=[], changed_at=0, terms=None)
            if rule is not None:
                found.append(rule)
        return found

    def chosen(
        self, properties: Properties, wanted: Callable[[RuleRow], bool]
    ) -> Iterator[tuple[int, RuleRow, AppliedRule | UnreadableRule | None, list[OverrideRow]]]:
        """Yield for each wanted rule, sorted by name: its rank, its row, the result of `_apply`, and its overrides.

        Yield only one rule for each name: the rule of the key's plan (rank 2). If there is none, yield the rule of the
        account's plan (rank 1). If there is none either, yield the default rule, which belongs to no plan (rank 0).
        """
        present, key_plan, account_plan, changed_at, overrides, groups, sources, terms, counter = properties
        plans = (0, account_plan, key_plan)  # by rank
        chosen: dict[str, tuple[int, RuleRow]] = {}
        for rank, plan in enumerate(plans):
            if rank == 0 or plan:
                chosen.update({name: (rank, row) for name, row in self._plans.get(plan, {}).items()})
        for name in sorted(chosen):
            rank, row = chosen[name]
            if not wanted(row):
                continue
            of_rule = [override for override in overrides if override.rule == name]
            if needs_unreadable(row, present):
                if _mode(row, of_rule) == "enforce":
                    on_failure = row.on_failure or conf.FAILURE_POLICY
                    yield rank, row, UnreadableRule(row.name, row.pk, row.meter, on_failure), of_rule
                continue
            if not applies_to_caller(row, present, groups):
                continue
            kind = counted_kind(row, present, sources)
            # Do not leave out a rule with an unknown kind of key: it is perhaps meant for this request. Such a rule is
            # not valid, so its failure policy decides.
            if kind is None and row.key_kind in COUNTED:
                continue
            # Look for the last deletion of a rule with this name, in this plan and in plans with a higher rank. Such a
            # deletion can be the reason why this rule applies now, so it counts as an edit of this rule.
            deleted_at = self._rows.deleted_at
            higher_plans = [plan for plan in plans[rank + 1 :] if plan]
            deletions = [deleted_at[plan, name] for plan in (row.plan, *higher_plans) if (plan, name) in deleted_at]
            applied = self._apply(row, kind or GLOBAL_KEY, of_rule, deletions, changed_at, terms)
            if counter and kind == "account" and isinstance(applied, AppliedRule):
                applied = replace(applied, key_kind=f"account/{counter}")
            yield rank, row, applied, of_rule

    def _apply(
        self,
        row: RuleRow,
        kind: str,
        overrides: list[OverrideRow],
        deletions: list[tuple[int, int]],
        changed_at: int,
        terms: PeriodTerms | None,
    ) -> AppliedRule | UnreadableRule | None:
        """Return the rule with the numbers and the mode of its overrides; None if the rule is off.

        If the rule is not valid, return an UnreadableRule, or None if the rule is in shadow mode. `deletions` has a
        version and a moment for each deletion.
        """
        mode = _mode(row, overrides)
        if mode == "off":
            return None
        on_failure = row.on_failure or conf.FAILURE_POLICY
        try:
            algorithm = overridden(row, kind, overrides)
        except ValueError as error:
            if not row.unreadable:
                pks = ", ".join(str(override.pk) for override in overrides)
                self._log_once(
                    f"Overrides {pks} of {row.name} are not valid: {error}. The rule's failure policy decides"
                )
            return None if mode == "shadow" else UnreadableRule(row.name, row.pk, row.meter, on_failure)
        if terms is not None:
            algorithm = algorithm.in_periods_of(terms)
        now = self._clock()
        span = algorithm.valid_span(now)
        if span is not None:
            _start, end = span
            self._seen(now, end)
        versions = [
            row.version,
            *(version for version, _deleted_at in deletions),
            *(item.version for item in overrides),
        ]
        moments = [row.edited_at, changed_at, *(deleted_at for _version, deleted_at in deletions)]
        moments += [max(item.edited_at, item.valid_from) for item in overrides]
        return AppliedRule(
            name=row.name,
            key="",  # The same result is used for many keys.
            key_kind=kind,
            algorithm=algorithm,
            meter=row.meter,
            mode=Mode.SHADOW if mode == "shadow" else Mode.ENFORCE,
            bills=row.bills,
            on_failure=on_failure,
            max_wait=row.max_wait,
            prefetch=row.prefetch,
            refusal_status=row.refusal_status,
            refusal_text=row.refusal_text,
            lasting=row.lasting,
            counts_since=row.counts_since,
            rule=row.pk,
            version=max(versions),
            since=max(moments),
            plan=self._rows.plans.get(row.plan, ""),
        )


def _mode(row: RuleRow, overrides: list[OverrideRow]) -> str:
    """Return the mode of the first override that has one; otherwise the mode of the rule."""
    return next((override.mode for override in overrides if override.mode), row.mode)
