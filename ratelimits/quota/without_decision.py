"""Answer a request by the failure policies of its rules.

The failure policies answer if Redis or the database cannot be asked, if rules have wrong values, or if more rules apply
than a decision takes. For the policy "local", the memory of this process has counts of its own.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from ratelimits import rules
from ratelimits.algorithms.base import MICROSECONDS
from ratelimits.algorithms.limits import Algorithm
from ratelimits.answers.answer import Answer
from ratelimits.conf import conf
from ratelimits.engine import Decision, Mode
from ratelimits.identity import Identity
from ratelimits.quota.costs import ONE_REQUEST, check_meters
from ratelimits.quota.counting import counting
from ratelimits.quota.prepared import Prepared, usage_key
from ratelimits.rules import AppliedRule, UnreadableRule
from ratelimits.rules.selection import key_of

#: The retry_after, in seconds, of a request that a failure policy refused.
_RETRY_AFTER = 1.0

#: Maximum number of limits in memory. The limits that were not used for the longest time are forgotten first.
MAX_KEYS = 100_000


class LocalLimiter:
    """Limits the requests of this process. Each limit has a bucket of permits, which come back at a steady rate.

    `Algorithm.quota` gives the number of permits in the bucket, and the time in which all of them come back (a minute
    if this time has no fixed length). The limiter protects a service while Redis does not answer. It is not exact, and
    it does not count usage.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.clear()

    def clear(self) -> None:
        """Forget the spent permits, and make a new lock. A forked process calls this method."""
        self._lock = threading.Lock()
        #: For each key and name of a limit: the number of spent permits at a moment, and this moment in seconds of the
        #: clock. Since this moment, permits come back one after another.
        self._spent: OrderedDict[tuple[str, str], tuple[float, float]] = OrderedDict()

    def charge(self, limits: list[tuple[str, str, Algorithm, int]]) -> float | None:
        """Charge all limits and return 0. If a limit refuses, charge none, and return the seconds to wait.

        After these seconds, all limits would admit the same request. None means that a limit can never admit it. A
        limit is a tuple (key, name, algorithm, cost).
        """
        now = self.clock()
        with self._lock:
            charged: dict[tuple[str, str], float] = {}
            wait: float | None = 0.0
            for key, name, algorithm, cost in limits:
                quota, micros = algorithm.quota
                spent, since = self._spent.get((key, name), (0.0, now))
                seconds = (micros or 60 * MICROSECONDS) / MICROSECONDS
                spent = max(spent - (now - since) * quota / seconds, 0.0)
                if cost > quota:
                    wait = None
                elif wait is not None and spent + cost > quota:
                    wait = max(wait, (spent + cost - quota) * seconds / quota)
                charged[key, name] = spent + cost
            if wait != 0:
                return wait
            for limit, spent in charged.items():
                self._spent[limit] = spent, now
                self._spent.move_to_end(limit)
            while len(self._spent) > MAX_KEYS:
                self._spent.popitem(last=False)
            return wait

    def give_back(self, limits: list[tuple[str, str, Algorithm, int]]) -> None:
        """Give back the permits of an earlier `charge` of these limits."""
        with self._lock:
            for key, name, _algorithm, cost in limits:
                # A forked process begins with no spent permits, and limits can be forgotten.
                spent, since = self._spent.get((key, name), (0.0, 0.0))
                if spent:
                    self._spent[key, name] = max(spent - cost, 0.0), since


local = LocalLimiter()
os.register_at_fork(after_in_child=local.clear)


def answer(
    prepared: Prepared | None, identity: Identity, scope: str, method: str, costs: Mapping[str, int], metered: bool
) -> Answer:
    """Return the answer of the failure policies.

    `prepared` has the rules that apply. If it is None, the rules or the rows about the request's key could not be
    read. Then the strictest policy of all rules in memory that can apply decides. If there is no such rule, the setting
    FAILURE_POLICY decides. `metered` is true if Redis would have counted the request as usage. Raise WrongCost if
    `prepared` is None and `costs` name a meter that is not known.
    """
    if prepared is not None:
        return by_policies(prepared, identity, costs, metered)
    snapshot = rules.in_memory()
    check_meters(costs, snapshot)
    possible = snapshot.possible(scope, method, identity) if snapshot is not None else []
    of_these_meters = [rule for rule in possible if rule.meter in costs]
    applied = [rule for rule in of_these_meters if isinstance(rule, AppliedRule)]
    unreadable = [rule for rule in of_these_meters if isinstance(rule, UnreadableRule)]
    policies = {rule.on_failure for rule in applied} or {conf.FAILURE_POLICY}
    return _answer(None, applied, unreadable, policies, identity, costs, metered)


def by_policies(prepared: Prepared, identity: Identity, costs: Mapping[str, int], metered: bool) -> Answer:
    """Return the answer of the failure policies of the rules in `prepared`."""
    applied = [rule for rule in (*prepared.rules, *prepared.left_out) if rule.mode is Mode.ENFORCE]
    if any(rule.algorithm.admits_nothing and costs[rule.meter] > 0 for rule in applied):
        # A rule that admits nothing refuses every request with a cost above 0, so no state in Redis is needed. Trying
        # again would never help.
        return Answer(False, prepared=prepared, retry_after=None)
    policies = {rule.on_failure for rule in applied}
    return _answer(prepared, applied, prepared.unreadable, policies, identity, costs, metered)


def _answer(
    prepared: Prepared | None,
    applied: Sequence[AppliedRule],
    unreadable: Sequence[UnreadableRule],
    policies: set[str],
    identity: Identity,
    costs: Mapping[str, int],
    metered: bool,
) -> Answer:
    refused = any(rule.refuses and costs[rule.meter] > 0 for rule in unreadable)
    if refused or "deny" in policies:
        counting.add("undecided", "", "refused", ONE_REQUEST)
        return Answer(False, prepared=prepared, retry_after=_RETRY_AFTER, unavailable=True)
    retry_after = local.charge(_local_limits(applied, identity, costs))
    if retry_after != 0:  # 0: no rule with the policy "local" refuses
        return Answer(False, prepared=prepared, retry_after=retry_after)
    if metered:
        counting.add("unmetered", identity.account_id, usage_key(identity), costs)
    return Answer(True, prepared=prepared)


def _local_limits(
    applied: Sequence[AppliedRule], identity: Identity, costs: Mapping[str, int]
) -> list[tuple[str, str, Algorithm, int]]:
    """Return the limits of the rules with the policy "local", as `LocalLimiter.charge` takes them."""
    return [
        (key_of(identity, rule.key_kind), rule.name, rule.algorithm, costs[rule.meter])
        for rule in applied
        if rule.on_failure == "local"
    ]


class RefusedByPolicy(Exception):
    """Raised if a failure policy refuses a request although Redis answers. `answer` is the answer to the request."""

    def __init__(self, answer: Answer) -> None:
        super().__init__()
        self.answer = answer


class Held:
    """What the rules that are left out of a decision say before Redis is asked.

    `refusal` is the answer of a rule that refuses; None if none refuses. Then the permits of the rules with the policy
    "local" are taken in the memory of this process. They are given back if Redis does not admit the request.
    """

    __slots__ = ("admitted", "limits", "refusal")

    def __init__(self, prepared: Prepared, identity: Identity, costs: Mapping[str, int]) -> None:
        self.limits: list[tuple[str, str, Algorithm, int]] = []
        self.admitted = False
        self.refusal: Answer | None = None
        if prepared.unavailable(costs):
            self.refusal = by_policies(prepared, identity, costs, metered=False)
            return
        limits = _local_limits(prepared.left_out, identity, costs)
        retry_after = local.charge(limits)
        if retry_after == 0:
            self.limits = limits
        else:
            self.refusal = Answer(False, prepared=prepared, retry_after=retry_after)

    def unless_refused(self, decision: Decision) -> Decision:
        """Return the decision of Redis. Raise RefusedByPolicy if a rule that is left out refuses."""
        if self.refusal is not None:
            raise RefusedByPolicy(self.refusal)
        self.admitted = decision.allowed
        return decision


@contextmanager
def held(prepared: Prepared, identity: Identity, costs: Mapping[str, int]) -> Iterator[Held]:
    """Take the permits of the rules that are left out. Give them back if the block does not admit the request."""
    found = Held(prepared, identity, costs)
    try:
        yield found
    finally:
        if not found.admitted:
            local.give_back(found.limits)
