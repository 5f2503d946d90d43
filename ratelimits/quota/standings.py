"""Where limits stand for an identity, and decisions that are not counted as usage.

`quota.checking` decides requests that are sold. Use this module only to report where limits stand, like `/usage/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from redis.exceptions import ResponseError

from ratelimits import rules
from ratelimits.engine import Decision, Stale, Standing, Unavailable
from ratelimits.engine.call import Call, Op
from ratelimits.engine.decide import decide_call
from ratelimits.engine.program import program
from ratelimits.engine.server import current_server
from ratelimits.identity import Identity
from ratelimits.quota.checking import RELOADS
from ratelimits.quota.prepared import Prepared, prepare
from ratelimits.rules import AppliedRule, RulesUnavailable, Selection, Snapshot
from ratelimits.rules.selection import GLOBAL_KEY

#: The errors if limits cannot be read or asked for.
UNAVAILABLE = (RulesUnavailable, Unavailable, ResponseError)

#: A function that chooses, from the rules in force, those to ask for.
Choice = Callable[[Snapshot, Identity], Iterable[Selection]]


def billing_rules(snapshot: Snapshot, identity: Identity) -> list[Selection]:
    """Return the rules that bill this identity, in every scope."""
    bills = [row for row in snapshot.rows.rules.values() if row.bills]
    asked = {(row.scope, min(row.methods, default="")) for row in bills}
    chosen = [snapshot.select(scope, method, identity) for scope, method in sorted(asked)]
    return [replace(one, rules=tuple(rule for rule in one.rules if rule.bills)) for one in chosen]


def uncounted(identity: Identity, choose: Choice, op: Op) -> tuple[Prepared, Decision | None]:
    """Decide the chosen rules for one permit each, without counting usage. The decision is None if no rule was chosen.

    With `Op.PEEK` nothing is charged. Raise UNAVAILABLE.
    """
    for _attempt in range(1 + RELOADS):
        snapshot = rules.current()
        chosen = list(choose(snapshot, identity))
        applied = {(rule.key_kind, rule.name): rule for selection in chosen for rule in selection.rules}
        versions = [selection.version for selection in chosen] or [snapshot.version if snapshot.versioned else None]
        version = min((one for one in versions if one is not None), default=None)
        meters = tuple(dict.fromkeys(rule.meter for rule in applied.values()))
        prepared = prepare(Selection(tuple(applied.values()), version), meters)
        keys = tuple(getattr(identity, field, field) for field in prepared.fields)
        costs = (1,) * len(meters)
        call = Call(prepared.program, keys, costs, identity.owner, version=version, op=op, at_once=True)
        if not applied or prepared.undecidable:
            # There is nothing to decide. The server is only asked whether these rules are still the newest.
            call = call._replace(program=program(()), keys=keys or (identity.account or GLOBAL_KEY,), op=Op.PEEK)
        try:
            decision = decide_call(current_server(), call)
        except Stale as stale:
            rules.reload(stale.version)
            continue
        except (Unavailable, ResponseError):
            if not applied:
                return prepared, None
            raise
        if prepared.undecidable:
            raise RulesUnavailable(prepared.undecidable)
        return prepared, decision if applied else None
    raise RulesUnavailable("the rules changed again and again while they were asked for")


def standings(identity: Identity, choose: Choice = billing_rules) -> list[tuple[AppliedRule, str, Standing]]:
    """Return each chosen rule, the key that it counts this identity under, and what is left. Raise UNAVAILABLE."""
    prepared, decision = uncounted(identity, choose, Op.PEEK)
    if decision is None:
        return []
    keys = [str(getattr(identity, rule.key_kind, rule.key_kind)) for rule in prepared.rules]
    return list(zip(prepared.rules, keys, decision.standings, strict=True))
