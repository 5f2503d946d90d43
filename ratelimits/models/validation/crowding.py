"""Check that at most `MAX_LIMITS` rules can apply to one request.

More rules than this cannot be decided together: see `quota.prepared`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import combinations, product
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db.models import Q

from ratelimits import moments
from ratelimits.engine.program import MAX_LIMITS
from ratelimits.models.fields.scopes import names_in, split_scope
from ratelimits.models.fields.view_key_texts import is_text

if TYPE_CHECKING:
    from django.db.models import QuerySet

    from ratelimits.models.overrides import KeyOverride
    from ratelimits.models.rules import Rule


class Crowd(NamedTuple):
    """The largest number of rules that can apply to one request in `scope`.

    `keys` are the keys of the request whose overrides switch some of these rules on.
    """

    rules: int
    scope: str
    keys: tuple[str, ...] = ()


class _Row(NamedTuple):
    """The columns of a rule that say to which requests the rule applies. `plan` is 0 for a default rule."""

    name: str
    plan: int
    meter: str
    mode: str
    callers: str
    except_scopes: tuple[str, ...]
    scope: str
    methods: frozenset[str]


def too_many(
    rules: QuerySet[Rule],
    overrides: QuerySet[KeyOverride],
    edited: Rule | None = None,
    edited_overrides: Sequence[KeyOverride] = (),
    key: str = "",
) -> Crowd | None:
    """Return the largest number of these rules that can apply to one request. Return None if at most `MAX_LIMITS` can.

    With `edited`, an unsaved rule, look only at requests to which this rule would apply. `edited_overrides` are not
    saved. With `key`, look only at requests of this key. A request can have two plans, the plan of its key and the plan
    of its account. The rules of these plans apply together with the default rules, but a plan's rule replaces the
    default rule of the same name. A request can also have a key of each kind, and an override of such a key can switch
    on a rule that is off. The number can be too large, never too small: it is not known which keys and plans come
    together.
    """
    off = rules.model.Mode.OFF
    if edited is not None:
        if edited.mode == off:
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
            mode,
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
    modes = _modes(overrides, edited_overrides, {row.name for row in rows if row.mode == off})
    on_for_some = {name for by_rule in modes.values() for name, mode in by_rule.items() if mode != off}
    # A rule that is off, and that no override switches on, applies to no request.
    rows = [row for row in rows if row.mode != off or row.name in on_for_some]
    if key:
        # Of all keys of this kind, the request has this one.
        modes = {one: by_rule for one, by_rule in modes.items() if one == key or _kind(one) != _kind(key)}
    crowds = (_largest(rows, *request, edited_row, modes) for request in _requests(rows, edited_row))
    if key:
        crowds = (crowd for crowd in crowds if key in crowd.keys)
    largest = max(crowds, default=Crowd(0, "*"))
    return largest if largest.rules > MAX_LIMITS else None


def _modes(
    overrides: QuerySet[KeyOverride], edited: Sequence[KeyOverride], off_rules: Set[str]
) -> dict[str, dict[str, str]]:
    """Return the modes that overrides give, by key and rule. Leave out overrides that are over.

    To find which rules HEAD requests meet, the overrides of other rules are needed too. `off_rules` are rules that are
    off: if several overrides of a key give such a rule a mode, one after another, take one that switches it on. Of any
    other rule take one that does not enforce it.
    """
    rows = overrides.exclude(mode="").filter(Q(valid_until=None) | Q(valid_until__gt=moments.now())).order_by()
    replaced = {row.pk for row in edited}
    values = [
        *(
            (key, rule, mode)
            for pk, key, rule, mode in rows.values_list("pk", "key", "rule", "mode")
            if pk not in replaced
        ),
        *((row.key, row.rule, row.mode) for row in edited if row.mode),
    ]
    found: dict[str, dict[str, str]] = {}
    for key, rule, mode in values:
        by_rule = found.setdefault(key, {})
        if rule not in by_rule or mode != ("off" if rule in off_rules else "enforce"):
            by_rule[rule] = mode
    return found


def _kind(key: str) -> str:
    """Return the kind of a key. A request has at most one key of each kind."""
    return key.partition("=" if is_text(key) else ":")[0]


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


def _scopes_with_head_rule(rows: list[_Row], weakened: Set[str]) -> set[tuple[str, str]]:
    """Return each (scope, meter) for which an enforced default rule names HEAD. Ignore rules that a plan can replace.

    Also ignore the rules `weakened`, which overrides of some keys do not enforce.

    Another rule with such a scope and meter covers HEAD only if it names HEAD itself: to name GET is not enough.
    """
    replaced_names = {row.name for row in rows if row.plan} | weakened
    head_rules = (row for row in rows if row.mode == "enforce" and not row.plan and "HEAD" in row.methods)
    return {(row.scope, row.meter) for row in head_rules if row.name not in replaced_names}


def _largest(
    rows: list[_Row],
    scope: str,
    method: str,
    callers: str,
    edited_row: _Row | None,
    modes: Mapping[str, Mapping[str, str]],
) -> Crowd:
    """Return the largest number of rules that can apply to one request with this scope, method and callers.

    `modes` are the modes that overrides give, by key and rule.
    """
    default_names: set[str] = set()
    off_names: set[str] = set()
    names_by_plan: dict[int, set[str]] = {}
    weakened = {name for by_rule in modes.values() for name, mode in by_rule.items() if mode != "enforce"}
    with_head_rule = _scopes_with_head_rule(rows, weakened) if method == "HEAD" else ()
    for row in rows:
        if not _applies(row, scope, method, callers):
            continue
        if row.methods and method not in row.methods and (row.scope, row.meter) in with_head_rule:
            continue
        if row.mode == "off":
            off_names.add(row.name)
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
    switched_on = _switched_on(off_names - default_names, modes)
    return Crowd(len(default_names) + added + sum(switched_on.values()), scope, tuple(switched_on))


def _switched_on(off_names: Set[str], modes: Mapping[str, Mapping[str, str]]) -> dict[str, int]:
    """Return the key of each kind whose overrides switch most of these rules on, with the number of these rules."""
    largest: dict[str, tuple[int, str]] = {}
    for key, by_rule in modes.items():
        count = sum(mode != "off" and name in off_names for name, mode in by_rule.items())
        if count:
            largest[_kind(key)] = max((count, key), largest.get(_kind(key), (0, "")))
    return {key: count for count, key in sorted(largest.values(), key=lambda found: found[1])}
