"""Where limits stand for an identity, and a throttle for this API itself. Nothing here is counted as usage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from redis.exceptions import ResponseError
from rest_framework.request import Request
from rest_framework.throttling import BaseThrottle

from ratelimits import rules
from ratelimits.conf import conf
from ratelimits.engine import Decision, Stale, Standing, Unavailable
from ratelimits.engine.call import Call, Op
from ratelimits.engine.decide import ask
from ratelimits.engine.program import program
from ratelimits.engine.server import server
from ratelimits.identity import Identity, identify
from ratelimits.quota import finishing
from ratelimits.quota.checking import RELOADS, Answer
from ratelimits.quota.prepared import Prepared, prepare
from ratelimits.rules import AppliedRule, RulesUnavailable, Selection, Snapshot
from ratelimits.rules.selection import GLOBAL_KEY
from ratelimits.throttling import QuotaUnavailable

if TYPE_CHECKING:
    from rest_framework.views import APIView

logger = logging.getLogger(__name__)

#: What asking for limits may raise when they cannot be had.
UNAVAILABLE = (RulesUnavailable, Unavailable, ResponseError)

Choice = Callable[[Snapshot, Identity], Iterable[Selection]]


def billing_rules(snapshot: Snapshot, identity: Identity) -> list[Selection]:
    """The rules that bill this identity, in whichever scope."""
    bills = [row for row in snapshot.rows.rules.values() if row.bills]
    asked = {(row.scope, min(row.methods, default="")) for row in bills}
    chosen = [snapshot.select(scope, method, identity) for scope, method in sorted(asked)]
    return [replace(one, rules=tuple(rule for rule in one.rules if rule.bills)) for one in chosen]


def _rules_of_scope(scope: str, method: str) -> Choice:
    """The rules of exactly this scope: those for every request are about what is sold."""

    def choose(snapshot: Snapshot, identity: Identity) -> list[Selection]:
        selection = snapshot.select(scope, method, identity)
        rows = snapshot.rows.rules
        if any(rule.refuses and rows[rule.rule].scope == scope for rule in selection.unreadable):
            raise QuotaUnavailable
        own = (rule for rule in selection.rules if rule.rule in rows and rows[rule.rule].scope == scope)
        return [replace(selection, rules=tuple(own))]

    return choose


def _ask(identity: Identity, choose: Choice, op: Op) -> tuple[Prepared, Decision | None]:
    """What the engine says of the chosen rules, each for one permit; None where there are none."""
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
            # There is nothing to decide; what is asked is only whether these rules are still the newest.
            call = call._replace(program=program(()), keys=keys or (identity.account or GLOBAL_KEY,), op=Op.PEEK)
        try:
            decision = ask(server(), call)
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
    """Each chosen rule, what it counts this identity under, and how much is left of it. Raises UNAVAILABLE."""
    prepared, decision = _ask(identity, choose, Op.PEEK)
    if decision is None:
        return []
    keys = [str(getattr(identity, rule.key_kind, rule.key_kind)) for rule in prepared.rules]
    return list(zip(prepared.rules, keys, decision.standings, strict=True))


class UnbilledThrottle(BaseThrottle):
    """Decides a request by the rules that name the view's `throttle_scope`, and counts it nowhere as usage."""

    def __init__(self) -> None:
        self._retry_after: float | None = 0.0

    def allow_request(self, request: Request, view: APIView) -> bool:
        choose = _rules_of_scope(getattr(view, "throttle_scope", None) or "", request.method or "")
        try:
            prepared, decision = _ask(identify(request), choose, Op.TRY)
        except UNAVAILABLE as error:
            logger.error("No decision could be had, FAILURE_POLICY decides: %s", error)
            if conf.FAILURE_POLICY == "deny":
                raise QuotaUnavailable from error
            return True
        if decision is None:
            return True
        answer = Answer(decision.allowed, decision, prepared, decision.retry_after)
        finishing.begin(getattr(request, "_request", request), answer)
        headers = getattr(view, "headers", None)
        if headers is not None:
            headers.update(answer.headers())
        self._retry_after = decision.retry_after
        return decision.allowed

    def wait(self) -> float | None:
        """Seconds until the same request would be admitted; None if it never can be."""
        return self._retry_after
