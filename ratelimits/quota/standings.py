"""Use the limits of an identity without counting usage: above all, ask how many permits are left.

The API's page `/usage/` shows what is left. `quota.checking` decides requests, and counts their usage.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from redis.exceptions import ResponseError

from ratelimits import rules
from ratelimits.background import within
from ratelimits.conf import conf
from ratelimits.engine import Decision, Lost, Mode, NotSent, Stale, Standing, Unavailable
from ratelimits.engine.call import Call, Op
from ratelimits.engine.decide import decide_call
from ratelimits.engine.program import program
from ratelimits.engine.server import UNDECIDED, current_server
from ratelimits.identity import Identity, kinds_in_account
from ratelimits.models.keys import key_name
from ratelimits.quota.checking import RELOADS
from ratelimits.quota.counting import counting
from ratelimits.quota.prepared import Prepared, prepare
from ratelimits.rules import AppliedRule, ExplainedRule, RulesUnavailable, Selection, Snapshot
from ratelimits.rules.selection import GLOBAL_KEY, key_of, plain_key

#: The errors that are raised if the rules cannot be read or Redis cannot be asked.
UNAVAILABLE = (RulesUnavailable, *UNDECIDED)

#: Maximum number of rules in one call of `live_limits`. A call with more rules would take long to compile.
_MAX_RULES_PER_CALL = 60
#: Maximum number of refusing rules for which `live_limits` asks how long to wait. Each of them needs a separate call.
_MAX_WAITS = 50

#: A function that chooses the rules to ask for.
Choice = Callable[[Snapshot, Identity], Iterable[Selection]]


def billing_rules(snapshot: Snapshot, identity: Identity) -> list[Selection]:
    """Return the rules that bill this identity, in every scope."""
    billing_rows = [row for row in snapshot.rows.rules.values() if row.bills]
    # A rule is found with any of its methods, and with "" if it applies to all methods.
    scopes = {(row.scope, min(row.methods, default="")) for row in billing_rows}
    selections = [snapshot.select(scope, method, identity) for scope, method in sorted(scopes)]
    return [replace(selection, rules=tuple(rule for rule in selection.rules if rule.bills)) for selection in selections]


def run_uncounted(identity: Identity, choose: Choice, op: Op) -> tuple[Prepared, Decision | None]:
    """Run an operation on the chosen rules, without counting usage. The decision is None if no rule was chosen.

    `op` is `Op.PEEK`, which changes nothing, `Op.TRY`, which charges the limits, or `Op.RESET`, which deletes their
    states. Raise one of the errors UNAVAILABLE.
    """
    for attempt in range(1 + RELOADS + 1):  # as in `checking`: the last call compares no versions
        snapshot = rules.current()
        chosen = list(choose(snapshot, identity))
        # The same rule can be in several selections.
        applied = {(rule.key_kind, rule.name): rule for selection in chosen for rule in selection.rules}
        versions = [selection.version for selection in chosen] or [snapshot.version if snapshot.versioned else None]
        version = min((number for number in versions if number is not None), default=None)
        if attempt > RELOADS:
            version = None  # the rules were read after this call began, so they are new enough
        meters = tuple(dict.fromkeys(rule.meter for rule in applied.values()))
        prepared = prepare(Selection(tuple(applied.values()), version), meters)
        call = _call(prepared, identity, version, op)
        if not applied or (prepared.undecided and op is not Op.TRY):
            # There is nothing to decide. Ask Redis only whether it has newer rules. A call without usage needs a key,
            # because the key says in which shard the call runs.
            call = call._replace(program=program(()), keys=call.keys or (identity.account or GLOBAL_KEY,), op=Op.PEEK)
        try:
            decision = decide_call(current_server(), call)
        except Stale as stale:
            rules.reload(stale.version)
            continue
        except Lost:
            counting.restore(call, prepared, identity, snapshot)
            continue
        except (Unavailable, ResponseError):
            if not applied:
                return prepared, None
            raise
        if prepared.undecided and op is not Op.TRY:
            raise RulesUnavailable(prepared.undecided)
        return prepared, decision if applied else None
    raise RulesUnavailable("the rules were edited again and again while Redis was asked")


def _call(prepared: Prepared, identity: Identity, version: int | None, op: Op, *, at_once: bool = True) -> Call:
    """Return a call that has the cost 1 in each meter and does not count usage."""
    keys = tuple(key_of(identity, kind) for kind in prepared.key_kinds)
    costs = (1,) * len(prepared.meters)
    return Call(
        prepared.program,
        keys,
        costs,
        identity.account_id,
        version=version,
        op=op,
        at_once=at_once,
        in_account=kinds_in_account(identity),
    )


class LiveLimit(NamedTuple):
    """A rule that applies to an identity, why it applies, and how many permits are left under it.

    key          the key that the rule counts, such as "user:42"; "" if the rule is off or cannot be read
    standing     None if the rule is off or cannot be read, or if Redis did not answer
    wait         seconds that one more request would wait before it proceeds; 0 if it would not wait
    retry_after  seconds until one more request would be admitted: 0 means now, None means never or not known
    """

    why: ExplainedRule
    key: str
    standing: Standing | None = None
    wait: float = 0.0
    retry_after: float | None = None


def live_limits(identity: Identity) -> tuple[list[LiveLimit], Exception | None]:
    """Return the rules that apply to an identity in some scope, and the error if Redis did not answer.

    The rules are sorted by name. Nothing is charged. All calls together take at most TIMEOUT, even if there are many
    rules and Redis hangs. Raise RulesUnavailable if the rules cannot be read.
    """
    end = time.monotonic() + conf.TIMEOUT
    # Read the newest rules first. If the known rules do not apply to the identity, Redis is not asked, and cannot
    # report that there are newer rules.
    snapshot = rules.reload()
    for attempt in range(1 + RELOADS + 1):  # as in `checking`: the last call compares no versions
        query = _LimitQuery(identity, snapshot, versioned=attempt <= RELOADS)
        try:
            error = query.ask(end - time.monotonic())
        except Stale as stale:
            snapshot = rules.reload(stale.version)
            continue
        return query.limits(), error
    raise RulesUnavailable("the rules were edited again and again while Redis was asked")


def with_text(limits: Sequence[LiveLimit], key: str) -> list[LiveLimit]:
    """Return the limits. The limits of this key get it as people write it, such as "header:X-Tenant=acme"."""
    name = key_name(key)
    return [limit._replace(key=key) if limit.key == name else limit for limit in limits]


class _LimitQuery:
    """The rules of an identity in one snapshot, and the answers of Redis. A thread adds the answers one by one."""

    def __init__(self, identity: Identity, snapshot: Snapshot, *, versioned: bool) -> None:
        self._identity = identity
        self._explained = snapshot.in_any_scope(identity)
        self._version = snapshot.version if versioned and snapshot.versioned else None
        self._rules = [why.rule for why in self._explained if isinstance(why.rule, AppliedRule)]
        #: The standings by the name of the rule.
        self._standings: dict[str, Standing] = {}
        #: For each refusing rule by name: the wait and the retry_after of one more request, in seconds.
        self._waits: dict[str, tuple[float, float | None]] = {}

    def ask(self, seconds: float) -> Exception | None:
        """Ask Redis, for at most `seconds`. Return the error if some answers are missing.

        Raise Stale if the rules are too old.
        """
        try:
            within(seconds, self._ask, "ratelimits-standings")
        except (TimeoutError, Unavailable, ResponseError) as error:
            return error
        return None

    def limits(self) -> list[LiveLimit]:
        """Return all rules, each with the answers that Redis has given so far."""
        return [self._limit(why) for why in self._explained]

    def _limit(self, why: ExplainedRule) -> LiveLimit:
        if not isinstance(why.rule, AppliedRule):
            return LiveLimit(why, "")
        standing = self._standings.get(why.rule.name)
        admits_now = standing is not None and standing.allowed
        wait, retry_after = self._waits.get(why.rule.name, (0.0, 0.0 if admits_now else None))
        key = plain_key(key_of(self._identity, why.rule.key_kind))
        return LiveLimit(why, key, standing, wait, retry_after)

    def _ask(self) -> None:
        for start in range(0, len(self._rules), _MAX_RULES_PER_CALL):
            group = self._rules[start : start + _MAX_RULES_PER_CALL]
            decided = self._decide(group, at_once=True).standings
            self._standings.update(zip((rule.name for rule in group), decided, strict=True))
        refusing = [rule for rule in self._rules if not self._standings[rule.name].allowed]
        for rule in refusing[:_MAX_WAITS]:
            # A decision does not contain the wait of a shadow rule, so ask as if the rule had the mode `enforce`.
            decision = self._decide([replace(rule, mode=Mode.ENFORCE)], at_once=False)
            self._waits[rule.name] = decision.wait, decision.retry_after

    def _decide(self, group: Sequence[AppliedRule], *, at_once: bool) -> Decision:
        prepared = prepare(Selection(tuple(group), self._version), tuple(dict.fromkeys(rule.meter for rule in group)))
        if prepared.undecided:
            raise NotSent(prepared.undecided)
        call = _call(prepared, self._identity, self._version, Op.PEEK, at_once=at_once)
        return decide_call(current_server(), call)


def standings(identity: Identity, choose: Choice = billing_rules) -> list[tuple[AppliedRule, str, Standing]]:
    """Return each chosen rule, with the key that it counts for this identity, and its standing (what is left).

    Raise one of the errors UNAVAILABLE.
    """
    prepared, decision = run_uncounted(identity, choose, Op.PEEK)
    if decision is None:
        return []
    keys = [plain_key(key_of(identity, rule.key_kind)) for rule in prepared.rules]
    return list(zip(prepared.rules, keys, decision.standings, strict=True))
