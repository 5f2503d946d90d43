"""The one door: request in, answer out. Who it is, which rules apply, what the engine decides, and what holds when
the engine cannot be asked.

Every face (the DRF throttle, the middleware, the decorators) asks here and only here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

from redis.exceptions import ResponseError

from ratelimits import headers, rules, witness
from ratelimits.conf import conf
from ratelimits.engine import Decision, Meter, Mode, Stale, Unanswered, Unavailable, Usage
from ratelimits.engine.call import Call, Command
from ratelimits.engine.decide import aask, ask
from ratelimits.engine.denied import Denied, DenyCache, Sender
from ratelimits.engine.fallback import Breaker, LocalLimiter
from ratelimits.engine.numbers import MICROSECONDS
from ratelimits.engine.program import Program, Term, program
from ratelimits.engine.server import server
from ratelimits.identity import Identity
from ratelimits.rules import AppliedRule, RulesUnavailable, Selection, Snapshot

logger = logging.getLogger(__name__)

#: What a request costs where nothing is said.
ONE_REQUEST: Mapping[str, int] = {"requests": 1}
#: Times that a decision is made again with newer rules before the failure policy decides.
RELOADS = 3
ANONYMOUS = "anonymous"

breaker = Breaker()
denials = DenyCache()
sender = Sender(denials, server)
local = LocalLimiter()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A selection for certain meters, with all that does not change from request to request."""

    rules: tuple[AppliedRule, ...]
    program: Program
    fields: tuple[str, ...]
    meters: tuple[Meter, ...]
    waits: bool
    policies: str
    quoted: tuple[str, ...]


class Answer(NamedTuple):
    """Whether a request may proceed.

    decision     the engine's; None when it could not be asked and the failure policy answered
    prepared     the rules that applied; None when they could not be had
    retry_after  seconds; None when the same request can never be admitted
    wait         seconds that the caller must hold the request back before it proceeds
    unavailable  the failure policy refused: not the client's fault
    """

    allowed: bool
    decision: Decision | None = None
    prepared: Prepared | None = None
    retry_after: float | None = 0.0
    wait: float = 0.0
    unavailable: bool = False

    @property
    def binding(self) -> AppliedRule | None:
        """The rule that binds, if one does."""
        place = self.decision.binding if self.decision is not None else None
        return self.prepared.rules[place] if self.prepared is not None and place is not None else None

    def headers(self) -> dict[str, str]:
        """The HTTP fields that tell the client where it stands."""
        allowed, decision, prepared, retry_after, *_ = self
        fields: dict[str, str] = {}
        place = decision.binding if decision is not None else None
        if place is not None and decision is not None and prepared is not None:
            reset = decision.reset_after if allowed or retry_after is None else retry_after
            fields["RateLimit-Policy"] = prepared.policies
            fields["RateLimit"] = headers.standing(prepared.quoted[place], decision.remaining, reset)
            if conf.X_RATELIMIT_HEADERS:
                fields |= headers.legacy(decision.limit or 0, decision.remaining, reset)
        if not allowed and retry_after is not None:
            fields["Retry-After"] = headers.retry_after(retry_after)
        return fields


_prepared: WeakKeyDictionary[Selection, dict[tuple[str, ...], Prepared]] = WeakKeyDictionary()


def prepare(selection: Selection, meters: tuple[str, ...]) -> Prepared:
    """What applies of a selection to a request that is counted by these meters; made once for each."""
    held = _prepared.get(selection)
    if held is None:
        held = _prepared[selection] = {}
    found = held.get(meters)
    if found is None:
        found = held[meters] = _prepare(selection, meters)
    return found


def _prepare(selection: Selection, meters: tuple[str, ...]) -> Prepared:
    applied = tuple(rule for rule in selection.rules if rule.meter in meters)
    fields = tuple(dict.fromkeys(rule.key_kind for rule in applied))
    terms = tuple(
        Term(
            rule.algorithm,
            rule.name,
            fields.index(rule.key_kind),
            meters.index(rule.meter),
            rule.mode,
            rule.rule,
            rule.version,
            rule.since,
            int(rule.max_wait * MICROSECONDS),
        )
        for rule in applied
    )
    bills = {rule.meter: rule for rule in reversed(applied) if rule.bills and rule.mode is Mode.ENFORCE}
    billed = tuple(
        Meter(name, bills[name].rule, bills[name].version) if name in bills else Meter(name) for name in meters
    )
    shown = [headers.policy(rule.name, rule.algorithm) for rule in applied if rule.mode is Mode.ENFORCE]
    waits = any(rule.max_wait > 0 for rule in applied)
    quoted = tuple(headers.quoted(rule.name) for rule in applied)
    return Prepared(applied, program(terms), fields, billed, waits, headers.policies(shown), quoted)


class Route(NamedTuple):
    """The way of one identity's requests in a scope, at the same costs: what applies, ready to be asked."""

    prepared: Prepared
    command: Command


class Routes:
    """The routes by a snapshot; another snapshot starts anew, and so does one that has MOST_ROUTES."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self.snapshot = snapshot
        #: Whether any route may let a request wait; not known yet, it may.
        self.waits = snapshot is None or snapshot.waits
        self.known: dict[tuple[object, ...], Route] = {}

    def learn(self, place: tuple[object, ...], question: Question, selection: Selection) -> Route:
        """The route of a question to which this selection applies, remembered."""
        if len(self.known) >= MOST_ROUTES:
            self.known.clear()
        prepared = prepare(selection, tuple(question.costs))
        assert self.snapshot is not None
        route = Route(prepared, Command(server().keyspace, _call(self.snapshot, selection.version, prepared, question)))
        return self.known.setdefault(place, route)


class Question(NamedTuple):
    """What a face asks."""

    identity: Identity
    scope: str
    method: str
    costs: Mapping[str, int]
    at_once: bool


MOST_ROUTES = 8192
_routes = Routes()


def may_wait() -> bool:
    """Whether a rule of those that this process knows lets requests wait."""
    return _routes.waits


def _routes_by(snapshot: Snapshot) -> Routes:
    global _routes
    routes = _routes
    if routes.snapshot is not snapshot:
        routes = _routes = Routes(snapshot)
    return routes


def _call(snapshot: Snapshot, version: int, prepared: Prepared, question: Question) -> Call:
    identity, costs = question.identity, tuple(question.costs.values())
    timezone, anchor, periods = snapshot.billing(identity.account)
    keys = tuple([getattr(identity, field, field) for field in prepared.fields])
    owner = identity.owner
    usage = Usage(owner, booked_to(identity), prepared.meters, periods, timezone, anchor)
    return Call(prepared.program, keys, costs, owner, usage, version=version, at_once=question.at_once)


def booked_to(identity: Identity) -> str:
    """The key that usage is counted under: without an account to bill, all of it together."""
    return (identity.narrowest if identity.account is not None else None) or ANONYMOUS


def valid(costs: Mapping[str, int]) -> Mapping[str, int]:
    """Costs by meter, checked: ValueError says what is wrong."""
    if not costs:
        raise ValueError("a request needs at least one meter, such as {'requests': 1}")
    for meter, cost in costs.items():
        if isinstance(cost, bool) or cost % 1 or not 0 <= cost <= 2**40:
            raise ValueError(f"the cost in {meter} must be a whole number from 0 to 2**40, not {cost!r}")
    return costs


def check(
    identity: Identity,
    scope: str = "*",
    method: str = "",
    costs: Mapping[str, int] = ONE_REQUEST,
    *,
    at_once: bool = False,
) -> Answer:
    """Decide and count one request by `identity`: in `scope`, by HTTP `method`, at `costs` in each meter.

    With `at_once` a request that would have to wait is refused, uncharged. Never raises for a server that is away.
    """
    place = _place(identity, scope, method, costs, at_once)
    denied = denials.look(place)
    if denied is not None:
        return _again(denied)
    prepared = None
    try:
        for _attempt in range(1 + RELOADS):
            snapshot = rules.current()
            routes = _routes_by(snapshot)
            route = routes.known.get(place)
            if route is None:
                question = Question(identity, scope, method, costs, at_once)
                route = routes.learn(place, question, snapshot.select(scope, method, identity))
            prepared, command = route
            if not breaker.closed:
                break
            try:
                decision = ask(server(), command.call, command)
            except Stale as stale:
                breaker.succeeded()
                rules.reload(stale.version)
                continue
            breaker.succeeded()
            return _answer(decision, prepared, place, identity, costs)
    except (RulesUnavailable, Unavailable, ResponseError) as error:
        _note(error, identity, costs)
    return _without(prepared, identity, costs)


async def acheck(
    identity: Identity,
    scope: str = "*",
    method: str = "",
    costs: Mapping[str, int] = ONE_REQUEST,
    *,
    at_once: bool = False,
) -> Answer:
    """`check`, awaited."""
    place = _place(identity, scope, method, costs, at_once)
    denied = denials.look(place)
    if denied is not None:
        return _again(denied)
    prepared = None
    try:
        for _attempt in range(1 + RELOADS):
            snapshot = await rules.acurrent()
            routes = _routes_by(snapshot)
            route = routes.known.get(place)
            if route is None:
                question = Question(identity, scope, method, costs, at_once)
                route = routes.learn(place, question, await rules.aselect(snapshot, scope, method, identity))
            prepared, command = route
            if not breaker.closed:
                break
            try:
                decision = await aask(server(), command.call, command)
            except Stale as stale:
                breaker.succeeded()
                await rules.areload(stale.version)
                continue
            breaker.succeeded()
            return _answer(decision, prepared, place, identity, costs)
    except (RulesUnavailable, Unavailable, ResponseError) as error:
        _note(error, identity, costs)
    return _without(prepared, identity, costs)


def _place(identity: Identity, scope: str, method: str, costs: Mapping[str, int], at_once: bool) -> tuple[object, ...]:
    """What requests that are alike have in common; ValueError for costs that make no sense."""
    if costs is ONE_REQUEST:
        return identity, scope, method, at_once
    return identity, scope, method, at_once, *valid(costs).items()


def _answer(
    decision: Decision, prepared: Prepared, place: tuple[object, ...], identity: Identity, costs: Mapping[str, int]
) -> Answer:
    if decision.allowed:
        # A view may go on to change its mapping.
        witness.admitted(identity.account, costs if costs is ONE_REQUEST else dict(costs), decision.reply[8])
        return Answer(True, decision, prepared, 0.0, decision.wait if prepared.waits else 0.0)
    seconds = conf.DENY_CACHE_SECONDS
    if seconds > 0:
        sender.start()
        denials.keep(place, decision, seconds, prepared)
    return Answer(False, decision, prepared, decision.retry_after)


def _again(denied: Denied) -> Answer:
    """A refusal that still stands, with less time to go."""
    left = denied.decision.retry_after
    if left is not None:
        left = max(left - (denials.clock() - denied.since), 1 / MICROSECONDS)
    return Answer(False, denied.decision, denied.about, left)


def _note(error: Exception, identity: Identity, costs: Mapping[str, int]) -> None:
    if isinstance(error, Unavailable):
        breaker.failed()
    if isinstance(error, Unanswered):
        witness.unanswered(identity.owner, booked_to(identity), costs)
    logger.error("No decision could be had, the failure policy decides: %s", error)


def _without(prepared: Prepared | None, identity: Identity, costs: Mapping[str, int]) -> Answer:
    """What the rules' own `on_failure` says, or the setting where not even the rules could be had."""
    applied = [rule for rule in prepared.rules if rule.mode is Mode.ENFORCE] if prepared is not None else []
    choices = {rule.on_failure for rule in applied} if prepared is not None else {conf.FAILURE_POLICY}
    asked = [
        (getattr(identity, rule.key_kind, None) or rule.key_kind, rule.name, rule.algorithm, costs[rule.meter])
        for rule in applied
        if rule.on_failure == "local"
    ]
    if "deny" in choices or not local.admits(asked):
        return Answer(False, None, prepared, 1.0, unavailable=True)
    witness.unmetered(identity.owner, booked_to(identity), costs)
    return Answer(True, None, prepared)
