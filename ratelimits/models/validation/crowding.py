"""Check that at most `MAX_LIMITS` rules can apply to one request."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, NamedTuple

from ratelimits.engine.program import MAX_LIMITS
from ratelimits.models.fields.scopes import names_in, split_scope

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from ratelimits.models.rules import Rule


class Crowd(NamedTuple):
    """The largest number of rules that can apply to one request in `scope`."""

    rules: int
    scope: str


class _Row(NamedTuple):
    """The columns of a rule that say to which requests the rule applies. `plan` is 0 for a default rule."""

    name: str
    plan: int
    meter: str
    enforced: bool
    callers: str
    except_scopes: tuple[str, ...]
    scope: str
    methods: frozenset[str]


def too_many(rules: QuerySet[Rule], edited: Rule | None = None) -> Crowd | None:
    """Return the largest number of these rules that can apply to one request. Return None if at most `MAX_LIMITS` can.

    With `edited`, an unsaved rule, look only at requests to which this rule would apply. A request can have two plans,
    the plan of its key and the plan of its account. The rules of these plans apply together with the default rules, but
    a plan's rule replaces the default rule of the same name.
    """
    modes = rules.model.Mode
    rules = rules.exclude(mode=modes.OFF)
    if edited is not None:
        if edited.mode == modes.OFF:
            return None
        rules = rules.exclude(pk=edited.pk)
    columns = "name", "plan_id", "meter", "mode", "callers", "group", "except_scopes", "scope"
    values: list[tuple[Any, ...]] = list(rules.order_by().values_list(*columns))
    if edited is not None:
        values.append(tuple(getattr(edited, column) for column in columns))
    rows = [
        _Row(
            name,
            plan or 0,
            meter,
            mode == modes.ENFORCE,
            "authenticated" if group else callers,
            names_in(except_scopes),
            *split_scope(scope),  # the scope and the methods
        )
        for name, plan, meter, mode, callers, group, except_scopes, scope in values
    ]
    # Of the rules with the same name, only one applies to a request.
    if len({row.name for row in rows}) <= MAX_LIMITS:
        return None
    edited_row = rows[-1] if edited is not None else None
    crowds = (_largest(rows, *request, edited_row) for request in _requests(rows, edited_row))
    largest = max(crowds, default=Crowd(0, "*"))
    return largest if largest.rules > MAX_LIMITS else None


def _requests(rows: list[_Row], edited_row: _Row | None) -> Iterator[tuple[str, str, str]]:
    """Yield one (scope, method, callers) for each kind of request that the rules distinguish.

    The scope "*" and the method "" stand for all scopes and methods that no rule names. A user can be a member of all
    groups, so a rule for a group is taken as a rule for all authenticated callers.
    """
    scopes = {row.scope for row in rows} | {"*"}
    if edited_row is not None and edited_row.scope != "*":
        scopes = {edited_row.scope}
    methods = sorted({method for row in rows for method in row.methods} | {""})
    all_callers = sorted({row.callers for row in rows} - {"everyone"}) or ["everyone"]
    for request in product(sorted(scopes), methods, all_callers):
        if edited_row is None or _applies(edited_row, *request):
            yield request


def _applies(row: _Row, scope: str, method: str, callers: str) -> bool:
    if row.scope not in ("*", scope) or scope in row.except_scopes or row.callers not in ("everyone", callers):
        return False
    # A rule that names GET covers HEAD.
    return not row.methods or method in row.methods or (method == "HEAD" and "GET" in row.methods)


def _scopes_with_head_rule(rows: list[_Row]) -> set[tuple[str, str]]:
    """Return each (scope, meter) for which an enforced default rule names HEAD. Ignore rules that a plan can replace.

    Another rule with such a scope and meter covers HEAD only if it names HEAD itself: to name GET is not enough.
    """
    replaced_names = {row.name for row in rows if row.plan}
    head_rules = (row for row in rows if row.enforced and not row.plan and "HEAD" in row.methods)
    return {(row.scope, row.meter) for row in head_rules if row.name not in replaced_names}


def _largest(rows: list[_Row], scope: str, method: str, callers: str, edited_row: _Row | None) -> Crowd:
    """Return the largest number of rules that can apply to one request with this scope, method and callers."""
    default_names: set[str] = set()
    names_by_plan: dict[int, set[str]] = {}
    with_head_rule = _scopes_with_head_rule(rows) if method == "HEAD" else ()
    for row in rows:
        if not _applies(row, scope, method, callers):
            continue
        if row.methods and method not in row.methods and (row.scope, row.meter) in with_head_rule:
            continue
        names = names_by_plan.setdefault(row.plan, set()) if row.plan else default_names
        names.add(row.name)
    added_by_plan = {plan: names - default_names for plan, names in names_by_plan.items()}
    if edited_row is not None and edited_row.plan:
        # Each request to which the edited rule applies has the plan of this rule, and perhaps one more plan.
        edited_plan_names = added_by_plan.get(edited_row.plan, set())
        added = max((len(edited_plan_names | names) for names in added_by_plan.values()), default=0)
    else:
        sizes = sorted(map(len, added_by_plan.values()), reverse=True)
        added = sum(sizes[:2])
        if len(default_names) + added > MAX_LIMITS and len(sizes) > 1:
            # The sum counts rules of the same name in two plans twice. So compare all pairs of plans, which is slower.
            added = max(len(first | second) for first, second in combinations(added_by_plan.values(), 2))
    return Crowd(len(default_names) + added, scope)
