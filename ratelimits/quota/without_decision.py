"""Answer a request by the failure policies of its rules.

The failure policies answer if Redis or the database cannot be asked, if rules have wrong values, or if more rules apply
than a decision takes.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from ratelimits import rules
from ratelimits.algorithms.limits import Algorithm
from ratelimits.answers.answer import Answer
from ratelimits.conf import conf
from ratelimits.engine import Decision, Mode
from ratelimits.identity import Identity
from ratelimits.quota import meters
from ratelimits.quota.costs import ONE_REQUEST
from ratelimits.quota.counting import counting
from ratelimits.quota.fallback import LocalLimiter
from ratelimits.quota.prepared import Prepared, usage_key
from ratelimits.rules import AppliedRule, UnreadableRule
from ratelimits.rules.selection import key_of

#: The retry_after, in seconds, of a request that a failure policy refused.
_RETRY_AFTER = 1.0

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
    meters.check(costs, snapshot)
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
