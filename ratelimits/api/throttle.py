"""A throttle for the usage API itself. Requests to the usage API are not billed, so the throttle counts no usage."""

from __future__ import annotations

from dataclasses import replace
from time import perf_counter_ns
from typing import TYPE_CHECKING

from rest_framework.request import Request
from rest_framework.throttling import BaseThrottle

from ratelimits import rules
from ratelimits.conf import conf
from ratelimits.engine.call import Op
from ratelimits.identity import Identity, identify
from ratelimits.logs import bounded
from ratelimits.quota import finishing, without_decision
from ratelimits.quota.answers import observing
from ratelimits.quota.answers.answer import Answer
from ratelimits.quota.from_memory import by_row
from ratelimits.quota.prepared import commands_by
from ratelimits.quota.standings import UNAVAILABLE, Choice, run_uncounted
from ratelimits.rules import Selection, Snapshot
from ratelimits.signals import request_refused
from ratelimits.throttling import QuotaBlocked, QuotaUnavailable
from ratelimits.throttling.view_headers import add_fields

if TYPE_CHECKING:
    from rest_framework.views import APIView

logger = bounded(__name__)

#: The answer if there is no decision, and a failure policy refuses the request.
_UNAVAILABLE = Answer(False, retry_after=None, unavailable=True)


class _DecidedWithoutRedis(Exception):
    """Raised if a block, an allow or a failure policy has decided the request, so that Redis is not asked."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


def _rules_of_scope(scope: str, method: str) -> Choice:
    """Return a function that chooses the rules with exactly this scope.

    The function does not choose rules with the scope "*", because these rules limit billable usage.
    """

    def choose(snapshot: Snapshot, identity: Identity) -> list[Selection]:
        answer = by_row(commands_by(snapshot), identity)
        if answer is not None:
            raise _DecidedWithoutRedis(answer)
        selection = snapshot.select(scope, method, identity)
        if selection.version not in (None, snapshot.version):
            # The rows about the key are newer than the snapshot. Perhaps a newer row is a block, so choose again.
            return choose(rules.current(), identity)
        rows = snapshot.rows.rules
        # A rule with wrong values cannot decide. So its failure policy decides.
        if any(rule.refuses and rows[rule.rule].scope == scope for rule in selection.unreadable):
            raise _DecidedWithoutRedis(_UNAVAILABLE)
        rules_of_scope = (rule for rule in selection.rules if rule.rule in rows and rows[rule.rule].scope == scope)
        return [replace(selection, rules=tuple(rules_of_scope))]

    return choose


class UnbilledThrottle(BaseThrottle):
    """A throttle of Django REST framework. It applies the rules of the view's `throttle_scope`, but counts no usage."""

    def __init__(self) -> None:
        self._retry_after: float | None = 0.0

    def allow_request(self, request: Request, view: APIView) -> bool:
        if not conf.ENABLED:
            return True
        scope, identity = getattr(view, "throttle_scope", None) or "", identify(request)
        started = perf_counter_ns()
        answer = _answer(identity, _rules_of_scope(scope, request.method or ""))
        if answer is None:
            return True
        if observing.observers:
            observing.observe(answer, scope, started, perf_counter_ns())
        if not answer.allowed and request_refused.receivers:
            observing.refused(answer, identity, scope, request.method or "")
        add_fields(request, view, answer.headers())
        if answer.unavailable:
            raise QuotaUnavailable
        finishing.begin(getattr(request, "_request", request), answer)
        if answer.access is not None and not answer.allowed:
            raise QuotaBlocked(answer.access)
        self._retry_after = answer.retry_after
        return answer.allowed

    def wait(self) -> float | None:
        """Return the seconds until the same request would be admitted; None if it can never be admitted."""
        return self._retry_after


def _answer(identity: Identity, choose: Choice) -> Answer | None:
    """Return the answer to a request; None if no rule, block or allow applies to it."""
    try:
        prepared, decision = run_uncounted(identity, choose, Op.TRY)
    except _DecidedWithoutRedis as decided:
        return decided.answer
    except UNAVAILABLE as error:
        logger.error("Redis made no decision, so FAILURE_POLICY decides: %s", error)
        return _UNAVAILABLE if conf.FAILURE_POLICY == "deny" else Answer(True)
    if decision is None:
        return None
    answer = Answer(decision.allowed, decision, prepared, decision.retry_after)
    if answer.allowed and prepared.left_out:
        costs = {meter.name: 1 for meter in prepared.meters}
        with without_decision.held(prepared, identity, costs) as held:
            held.admitted = held.refusal is None
        if held.refusal is not None:
            finishing.give_back(answer)
            return held.refusal
    return answer
