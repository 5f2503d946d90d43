"""Decide an outbound call: find its rules, and let the engine decide. Nothing waits here.

The code is written once, for sync and async callers. The functions are generators that yield instructions, such as
"read the rules" or "ask Redis". `run` and `arun` in `ratelimits.outbound.waiting` carry out each instruction, and send
back its result.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from time import perf_counter_ns
from typing import Any, NamedTuple

from redis.exceptions import ResponseError

from ratelimits.algorithms import typed_rates
from ratelimits.algorithms.base import HORIZON, MICROSECONDS
from ratelimits.algorithms.limits import Algorithm, LeakyBucketQueue
from ratelimits.answers import observing
from ratelimits.answers.answer import Answer
from ratelimits.conf import conf
from ratelimits.engine import ANY, Decision, Stale, Unavailable
from ratelimits.engine.call import Call, Op
from ratelimits.engine.decision import handed_over
from ratelimits.engine.program import Term, program
from ratelimits.engine.server import breaker, note_failure
from ratelimits.identity import NO_CLIENT, Identity, kinds_in_account
from ratelimits.logs import bounded
from ratelimits.quota import without_decision
from ratelimits.quota.checking import RELOADS
from ratelimits.quota.costs import WrongCost, check_meters, need_newer_rules
from ratelimits.quota.prepared import Prepared, prepare
from ratelimits.rules import RulesUnavailable, in_memory
from ratelimits.rules.selection import GLOBAL_KEY, key_of

logger = bounded(__name__)

#: Seconds after which a caller asks again if Redis did not answer. The failure policies of rules can give another
#: number.
PAUSE = 1.0
#: The identity of an outbound call if none is given: one caller for the whole project. A rule that counts per
#: caller or per address then counts all these calls together.
PROJECT = Identity(address=NO_CLIENT)
#: Maximum number of permits that can wait under a rate given in code.
_MAX_PLACES = 1_000_000


class WaitTooLong(Exception):
    """The permits cannot be granted within the longest wait. Nothing was charged.

    name         the name of the outbound call
    limit        the name of the limit that refused; "" if Redis did not answer
    retry_after  seconds until the permits could be granted, if no other call comes; None if never
    """

    def __init__(self, name: str, limit: str, retry_after: float | None, max_wait: float | None) -> None:
        limited_by = f"the limit {limit!r}" if limit else "its failure policy, because Redis does not answer,"
        within = "" if max_wait is None else f" within {max_wait:g} s"
        after = "it can never be granted" if retry_after is None else f"it could be granted in {retry_after:.3f} s"
        super().__init__(f"{name}: {limited_by} does not grant this call{within}; {after}")
        self.name = name
        self.limit = limit
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        # An exception is usually copied with its message as the only argument. Celery copies exceptions.
        return _restored, (str(self), self.name, self.limit, self.retry_after)


def _restored(message: str, name: str, limit: str, retry_after: float | None) -> WaitTooLong:
    error = WaitTooLong(name, limit, retry_after, None)
    error.args = (message,)
    return error


class SelectRules(NamedTuple):
    """An instruction: return the Selection of this scope and identity.

    If `newer` is not None, first read the rules with this version or a newer one. If `again` is true, first read the
    rules again.
    """

    scope: str
    identity: Identity
    newer: int | None = None
    again: bool = False


class DecideCall(NamedTuple):
    """An instruction: return the engine's decision on a call."""

    call: Call


class Turn(NamedTuple):
    """The answer that `Outbound.ask` returns: whether the call may proceed, and when.

    allowed      whether the permits are granted; the call may use them after `wait` seconds
    wait         seconds until the call may proceed
    limit        the name of the limit that refused; "" if no limit refused
    algorithm    the algorithm of this limit, or None
    retry_after  seconds after which the caller may ask again; None if the permits can never be granted
    decision     the engine's decision; None if Redis was not asked or did not answer
    unavailable  true if there was no decision, and a failure policy refused the call without counting it
    """

    allowed: bool
    wait: float = 0.0
    limit: str = ""
    algorithm: Algorithm | None = None
    retry_after: float | None = 0.0
    decision: Decision | None = None
    unavailable: bool = False


#: The answer if nothing limits the call.
_UNLIMITED = Turn(True)
#: A generator that yields instructions, receives their results, and returns a Turn.
Steps = Generator[Any, Any, Turn]


@dataclass(frozen=True, slots=True)
class Outbound:
    """An outbound call.

    name       the scope of its rules
    costs      its cost in each meter
    algorithm  its limit, if this was given in code. If it is None, the rules with this scope limit the call
    identity   the identity whose keys the rules count
    """

    name: str
    costs: Mapping[str, int]
    algorithm: Algorithm | None = None
    identity: Identity = PROJECT

    def ask(self, timeout: float | None) -> Steps:
        """Ask once for the permits, and return the answer.

        `timeout` is the longest accepted wait in seconds; None for any wait.
        """
        started = perf_counter_ns()
        turn = yield from self._ask(timeout)
        if observing.observers and turn is not _UNLIMITED:
            answer = Answer(turn.allowed, turn.decision, unavailable=turn.unavailable)
            observing.observe(answer, self.name, started, perf_counter_ns())
        return turn

    def handed_over(self, turn: Turn, lease: bytes) -> Turn:
        """Return the answer to a call that was refused, waited, and got this lease from the server."""
        assert turn.decision is not None
        now = perf_counter_ns()
        granted = _turn(handed_over(turn.decision.call, lease))
        observing.observe(Answer(True, granted.decision), self.name, now, now)
        return granted

    def _ask(self, timeout: float | None) -> Steps:
        if not conf.ENABLED:
            return _UNLIMITED
        accepted_wait = ANY if timeout is None else max(timeout, 0)
        prepared: Prepared | None = None
        version: int | None = None
        newer: int | None = None
        try:
            for attempt in range(2 + RELOADS):
                if self.algorithm is None:
                    selection = yield SelectRules(self.name, self.identity, newer)
                    snapshot = in_memory()
                    if snapshot is not None and need_newer_rules(self.costs, snapshot):
                        selection = yield SelectRules(self.name, self.identity, again=True)
                    self._check_meters()
                    prepared = prepare(selection, tuple(self.costs))
                    # The last attempt names no version, so Redis accepts these rules even if there are newer rules.
                    version = selection.version if attempt <= RELOADS else None
                # `announces` tells the script that a refused caller waits until a lease is released. A caller that
                # accepts no wait does not wait for a lease.
                call = self._call(prepared, version, accepted_wait)._replace(announces=accepted_wait != 0)
                if not breaker.closed:
                    break
                try:
                    decision = yield from self._decide(call, prepared)
                except Stale as stale:
                    breaker.succeeded()
                    newer = stale.version
                    continue
                if decision is None:
                    return _UNLIMITED
                breaker.succeeded()
                return _turn(decision)
        except without_decision.RefusedByPolicy as refused:
            return _turn_of(refused.answer)
        except (RulesUnavailable, Unavailable, ResponseError) as error:
            note_failure(error)
            logger.error("There is no decision on %s (%s), so the failure policy decides", self.name, error)
        return self._by_policies(prepared)

    def _decide(self, call: Call, prepared: Prepared | None) -> Generator[Any, Any, Decision | None]:
        """Return the decision of Redis; None if no rule limits the call.

        Raise RefusedByPolicy if a rule refuses that Redis cannot decide. Then Redis is only asked whether it has newer
        rules.
        """
        if prepared is None or not (prepared.left_out or prepared.unavailable(self.costs)):
            return (yield DecideCall(call)) if call.program.terms else None
        with without_decision.held(prepared, self.identity, self.costs) as held:
            if held.refusal is not None:
                call = call._replace(program=program(()), keys=call.keys or (GLOBAL_KEY,), op=Op.PEEK)
            return held.unless_refused((yield DecideCall(call)))

    def _call(self, prepared: Prepared | None, version: int | None, timeout: float) -> Call:
        costs = tuple(self.costs.values())
        if prepared is None:
            assert self.algorithm is not None
            limits = program((Term(self.algorithm, "in code", key=0, slot=0),))
            return Call(limits, (f"outbound:{self.name}",), costs, timeout=timeout, version=None)
        # The max_wait of a rule is for requests to this project. With -1, the call's own `timeout` is used instead.
        limits = program(tuple(replace(term, max_wait=-1) for term in prepared.program.terms))
        keys = tuple([key_of(self.identity, kind) for kind in prepared.key_kinds])
        account = self.identity.account_id
        return Call(
            limits, keys, costs, account, timeout=timeout, version=version, in_account=kinds_in_account(self.identity)
        )

    def _check_meters(self) -> None:
        """Raise WrongCost, with the name of the call, if its cost names a meter that is not known."""
        try:
            check_meters(self.costs, in_memory())
        except WrongCost as error:
            raise WrongCost(f"{self.name}: {error}") from None

    def _by_policies(self, prepared: Prepared | None) -> Turn:
        if self.algorithm is not None:
            allowed = conf.FAILURE_POLICY == "allow"
            return Turn(allowed, retry_after=PAUSE, unavailable=not allowed)
        if prepared is None:
            self._check_meters()
        answer = without_decision.answer(
            prepared, self.identity, scope=self.name, method="", costs=self.costs, metered=False
        )
        return _turn_of(answer)


def _turn_of(answer: Answer) -> Turn:
    return Turn(answer.allowed, retry_after=answer.retry_after, unavailable=answer.unavailable)


def _turn(decision: Decision) -> Turn:
    if decision.allowed:
        return Turn(True, decision.wait, decision=decision)
    assert decision.binding is not None
    term = decision.program.terms[decision.binding]
    return Turn(False, 0.0, term.name, term.algorithm, decision.retry_after, decision)


@lru_cache(maxsize=256)
def algorithm_from_rate(rate: str) -> Algorithm:
    """Return the limit of a rate such as "3000/min": calls proceed one by one, evenly spaced, in their order.

    At this rate, at most 3000 permits are granted in any minute. Raise ValueError for a wrong rate.
    """
    permits, period = typed_rates.rate(rate)
    places = _MAX_PLACES
    if permits > 0:
        # At a low rate, the time of _MAX_PLACES permits would be too long to be exact. So take fewer places. Two places
        # are subtracted: one request proceeds without a place, and rounding can add one.
        places = min(places, int(HORIZON / MICROSECONDS * float(permits / period)) - 2)
    return LeakyBucketQueue(max(places, 1), permits, period)
