"""Ask how much an identity has left under its limits, without counting usage.

Use this module only to report what is left, as the API's page `/usage/` does. `quota.checking` decides requests.
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

#: The errors that are raised if the rules cannot be read or Redis cannot be asked.
UNAVAILABLE = (RulesUnavailable, Unavailable, ResponseError)

#: A function that chooses the rules to ask for.
Choice = Callable[[Snapshot, Identity], Iterable[Selection]]


def billing_rules(snapshot: Snapshot, identity: Identity) -> list[Selection]:
    """Return the rules that bill this identity, in every scope."""
    bills = [row for row in snapshot.rows.rules.values() if row.bills]
    scopes = {(row.scope, min(row.methods, default="")) for row in bills}
    chosen = [snapshot.select(scope, method, identity) for scope, method in sorted(scopes)]
    return [replace(one, rules=tuple(rule for rule in one.rules if rule.bills)) for one in chosen]


def uncounted(identity: Identity, choose: Choice, op: Op) -> tuple[Prepared, Decision | None]:
    """Run `op` on the chosen rules, without counting usage. The decision is None if no rule was chosen.

    `Op.PEEK` changes nothing, `Op.RESET` deletes the limits' states. Raise one of the errors UNAVAILABLE.
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
            # There is nothing to decide. Ask Redis only whether these rules are still the newest.
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
    """Return each chosen rule, with the key that it counts for this identity, and what is left.

    Raise one of the errors UNAVAILABLE.
    """
    prepared, decision = uncounted(identity, choose, Op.PEEK)
    if decision is None:
        return []
    keys = [str(getattr(identity, rule.key_kind, rule.key_kind)) for rule in prepared.rules]
    return list(zip(prepared.rules, keys, decision.standings, strict=True))
