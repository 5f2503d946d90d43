"""Decide limits that are written in code, such as the rates of a throttle class.

No rule is read and no usage is counted. So this module needs no table of the database.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from time import perf_counter_ns

from ratelimits.algorithms.limits import SlidingLog
from ratelimits.answers import observing
from ratelimits.answers.answer import PASSED, Answer
from ratelimits.conf import conf
from ratelimits.engine import Limit, decide, memory, server
from ratelimits.engine.command import StatesExist
from ratelimits.engine.decide import call_for
from ratelimits.engine.server import UNDECIDED, breaker, current_server, note_failure
from ratelimits.logs import bounded
from ratelimits.signals import request_refused

logger = bounded(__name__)

#: Keys that Redis has a log of. Redis is not asked again about them while memory is short.
_known: set[str] = set()
_MAX_KNOWN = 8192


def check_limits(limits: Sequence[Limit], now: int | None = None) -> Answer:
    """Decide one request. If an enforced limit refuses it, charge no limit. Otherwise charge each limit that admits it.

    `now` is the moment of the decision in µs since 1970 UTC. If it is None, the server's time is used. If Redis cannot
    be asked, the setting FAILURE_POLICY decides.
    """
    if not conf.ENABLED:
        return PASSED
    if observing.observers:
        started = perf_counter_ns()
        answer = _decide(limits, now)
        observing.observe(answer, "*", started, perf_counter_ns())
    else:
        answer = _decide(limits, now)
    if not answer.allowed and request_refused.receivers:
        # Rates in code belong to no scope. They count requests by a cache key instead of an identity.
        observing.refused(answer, identity=None, scope="*", method="")
    return answer


def _decide(limits: Sequence[Limit], now: int | None) -> Answer:
    if server.before_use is not None:
        server.before_use()
    if not breaker.closed:
        return _answer_without_decision()
    try:
        decision = decide(limits, now=now)
    except UNDECIDED as error:
        note_failure(error)
        logger.error("There is no decision, so FAILURE_POLICY decides: %s", error)
        return _answer_without_decision()
    breaker.succeeded()
    return Answer(decision.allowed, decision, retry_after=decision.retry_after)


def is_known(key: str) -> bool:
    """Return whether Redis has the log of a key. Return True if it cannot be asked: then a failure policy decides."""
    if key in _known:
        return True
    if not breaker.closed:
        return True
    asked, call = current_server(), call_for([Limit(key, SlidingLog(1, Decimal(1)))])
    try:
        found = bool(asked.wire.call(StatesExist(asked.keyspace, call, 0), b""))
    except UNDECIDED as error:
        note_failure(error)
        return True
    breaker.succeeded()  # perhaps only one call may try: then the decision may follow it
    if found:
        if len(_known) >= _MAX_KNOWN:
            _known.clear()
        _known.add(key)
    return found


memory.on_change.append(_known.clear)


def _answer_without_decision() -> Answer:
    if conf.FAILURE_POLICY == "deny":
        return Answer(False, retry_after=1.0, unavailable=True)  # ask clients to wait for a second
    return Answer(True)
