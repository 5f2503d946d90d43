"""Check the number of rules that can apply to one request. It may not exceed MAX_LIMITS."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import TYPE_CHECKING, NamedTuple

from ratelimits.engine.program import MAX_LIMITS
from ratelimits.models.fields.scopes import split_scope

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from ratelimits.models.rules import Rule


class Crowd(NamedTuple):
    """The largest number of rules that can apply to one request in `scope`."""

    rules: int
    scope: str


class _Row(NamedTuple):
    name: str
    plan: int
    meter: str
    enforced: bool
    scope: str
    methods: frozenset[str]


def too_many(rules: QuerySet[Rule], edited: Rule | None = None) -> Crowd | None:
    """Return the largest number of these rules that can apply to one request, if it exceeds MAX_LIMITS, otherwise None.

    With `edited`, an unsaved rule, look only at requests to which this rule would apply. A request may be on the plan
    of a key and on the plan of an account. The rules of plans are added to the default rules, and replace those with
    the same names.
    """
    modes = rules.model.Mode
    rules = rules.exclude(mode=modes.OFF)
    if edited is not None:
        if edited.mode == modes.OFF:
            return None
        rules = rules.exclude(pk=edited.pk)
    values: list[tuple[str, int | None, str, str, str]] = list(
        rules.order_by().values_list("name", "plan", "meter", "mode", "scope")
    )
    if edited is not None:
        values.append((edited.name, edited.plan_id, edited.meter, edited.mode, edited.scope))
    rows = [
        _Row(name, plan or 0, meter, mode == modes.ENFORCE, *split_scope(scope))
        for name, plan, meter, mode, scope in values
    ]
    if len({row.name for row in rows}) <= MAX_LIMITS:
        return None
    own = rows[-1] if edited is not None else None
    crowds = (_largest(rows, scope, method, own) for scope, method in _requests(rows, own))
    largest = max(crowds, default=Crowd(0, "*"))
    return largest if largest.rules > MAX_LIMITS else None


def _requests(rows: list[_Row], own: _Row | None) -> Iterator[tuple[str, str]]:
    """Yield scopes and methods that differ in their rules. "" stands for all methods that no rule names."""
    scopes = {row.scope for row in rows} | {"*"}
    if own is not None and own.scope != "*":
        scopes = {own.scope}
    methods = sorted({method for row in rows for method in row.methods} | {""})
    for scope in sorted(scopes):
        for method in methods:
            if own is None or _applies(own, scope, method):
                yield scope, method


def _applies(row: _Row, scope: str, method: str) -> bool:
    if row.scope not in ("*", scope):
        return False
    # A rule that names GET covers HEAD.
    return not row.methods or method in row.methods or (method == "HEAD" and "GET" in row.methods)


def _with_head_rule(rows: list[_Row]) -> set[tuple[str, str]]:
    """Return the scopes and meters with a rule for everyone that names HEAD: there, rules for GET do not cover HEAD."""
    replaced = {row.name for row in rows if row.plan}
    named = (row for row in rows if row.enforced and not row.plan and "HEAD" in row.methods)
    return {(row.scope, row.meter) for row in named if row.name not in replaced}


def _largest(rows: list[_Row], scope: str, method: str, own: _Row | None) -> Crowd:
    default: set[str] = set()
    plans: dict[int, set[str]] = {}
    with_head_rule = _with_head_rule(rows) if method == "HEAD" else ()
    for row in rows:
        if not _applies(row, scope, method):
            continue
        if row.methods and method not in row.methods and (row.scope, row.meter) in with_head_rule:
            continue
        (plans.setdefault(row.plan, set()) if row.plan else default).add(row.name)
    further = {plan: names - default for plan, names in plans.items()}
    if own is not None and own.plan:
        first = further.get(own.plan, set())
        added = max((len(first | names) for names in further.values()), default=0)
    else:
        sizes = sorted(map(len, further.values()), reverse=True)
        added = sum(sizes[:2])
        if len(default) + added > MAX_LIMITS and len(sizes) > 1:
            # Plans often have rules of the same names, so each pair is counted, but only if the plain sum is too large.
            added = max(len(first | second) for first, second in combinations(further.values(), 2))
    return Crowd(len(default) + added, scope)
