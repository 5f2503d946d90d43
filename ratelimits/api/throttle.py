"""A throttle for the usage API itself. Requests to the usage API are not billed, so the throttle counts no usage."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rest_framework.request import Request
from rest_framework.throttling import BaseThrottle

from ratelimits import rules
from ratelimits.conf import conf
from ratelimits.engine.call import Op
from ratelimits.identity import Identity, identify
from ratelimits.logs import bounded
from ratelimits.quota import finishing
from ratelimits.quota.answers.answer import Answer
from ratelimits.quota.checking import by_row
from ratelimits.quota.prepared import commands_by
from ratelimits.quota.standings import UNAVAILABLE, Choice, run_uncounted
from ratelimits.rules import Selection, Snapshot
from ratelimits.throttling import QuotaBlocked, QuotaUnavailable

if TYPE_CHECKING:
    from rest_framework.views import APIView

logger = bounded(__name__)


class _Decided(Exception):
    """Tells the throttle that a block or an allow has decided the request. Then no rule is needed."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


def _rules_of_scope(scope: str, method: str) -> Choice:
    """Return a function that chooses the rules with exactly this scope.

    It does not choose rules with the scope "*", because they limit billable usage.
    """

    def choose(snapshot: Snapshot, identity: Identity) -> list[Selection]:
        answer = by_row(commands_by(snapshot), identity)
        if answer is not None:
            raise _Decided(answer)
        selection = snapshot.select(scope, method, identity)
        if selection.version not in (None, snapshot.version):
            # The rows about the key are newer than the snapshot. The edit between them may be a block, so choose again.
            return choose(rules.current(), identity)
        rows = snapshot.rows.rules
        if any(rule.refuses and rows[rule.rule].scope == scope for rule in selection.unreadable):
            raise QuotaUnavailable
        of_scope = (rule for rule in selection.rules if rule.rule in rows and rows[rule.rule].scope == scope)
        return [replace(selection, rules=tuple(of_scope))]

    return choose


class UnbilledThrottle(BaseThrottle):
    """A throttle of Django REST framework. It applies the rules of the view's `throttle_scope`, but counts no usage."""

    def __init__(self) -> None:
        self._retry_after: float | None = 0.0

    def allow_request(self, request: Request, view: APIView) -> bool:
        if not conf.ENABLED:
            return True
        choose = _rules_of_scope(getattr(view, "throttle_scope", None) or "", request.method or "")
        django_request = getattr(request, "_request", request)
        try:
            prepared, decision = run_uncounted(identify(request), choose, Op.TRY)
        except _Decided as decided:
            finishing.begin(django_request, decided.answer)
            if decided.answer.access is not None and not decided.answer.allowed:
                raise QuotaBlocked(decided.answer.access) from None
            return True
        except UNAVAILABLE as error:
            logger.error("Redis made no decision, so FAILURE_POLICY decides: %s", error)
            if conf.FAILURE_POLICY == "deny":
                raise QuotaUnavailable from error
            return True
        if decision is None:
            return True
        answer = Answer(decision.allowed, decision, prepared, decision.retry_after)
        finishing.begin(django_request, answer)
        headers = getattr(view, "headers", None)
        if headers is not None:
            headers.update(answer.headers())
        self._retry_after = decision.retry_after
        return decision.allowed

    def wait(self) -> float | None:
        """Return the seconds until the same request would be admitted; None if no rule can ever admit it."""
        return self._retry_after
