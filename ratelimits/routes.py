"""The routes of requests: for those that are alike, what applies to them, ready to be asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ratelimits import headers
from ratelimits.conf import conf
from ratelimits.engine import Meter, Mode, Usage
from ratelimits.engine.allotment import Allotment, Take, lends_itself
from ratelimits.engine.call import Call, Command
from ratelimits.engine.limits import Concurrency
from ratelimits.engine.numbers import MICROSECONDS
from ratelimits.engine.program import Program, Term, program
from ratelimits.engine.server import server
from ratelimits.identity import Identity
from ratelimits.rules import AppliedRule, Selection, Snapshot

#: Routes that are remembered at most; past it, all of a process' are found anew.
MOST_ROUTES = 8192
ANONYMOUS = "anonymous"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A selection for certain meters, with all that does not change from request to request.

    `leases`: whether a rule hands out leases, which end with their request. `allotment` is the most requests whose
    permits may be taken ahead: 0 unless every rule lends itself to that.
    """

    rules: tuple[AppliedRule, ...]
    program: Program
    fields: tuple[str, ...]
    meters: tuple[Meter, ...]
    waits: bool
    leases: bool
    allotment: int
    policies: str
    quoted: tuple[str, ...]


def prepare(selection: Selection, meters: tuple[str, ...]) -> Prepared:
    """What applies of a selection to a request that is counted by these meters; made once for each."""
    found: Prepared | None = selection.kept.get(meters)
    if found is None:
        found = selection.kept[meters] = _prepare(selection, meters)
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
    leases = any(isinstance(rule.algorithm, Concurrency) for rule in applied)
    quoted = tuple(headers.quoted(rule.name) for rule in applied)
    ahead = min((rule.allotment if _ahead(rule) else 0 for rule in applied), default=0)
    return Prepared(applied, program(terms), fields, billed, waits, leases, ahead, headers.policies(shown), quoted)


def _ahead(rule: AppliedRule) -> bool:
    """Whether its permits may be taken ahead; rows that were written without a form may say what makes no sense."""
    return rule.mode is Mode.ENFORCE and not rule.bills and lends_itself(rule.algorithm)


class Route(NamedTuple):
    """The way of one identity's requests in a scope, at the same costs: what applies, ready to be asked."""

    prepared: Prepared
    take: Take
    allotment: Allotment | None


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
        here, call = server(), _call(self.snapshot, selection.version, prepared, question)
        allotment = None
        if prepared.allotment and conf.ALLOTMENT_SECONDS > 0:
            # What is spent here cannot be counted as usage in the moment that it is decided, so none of it is.
            unmetered = call._replace(usage=None)
            allotment = Allotment(here, unmetered, prepared.allotment, conf.ALLOTMENT_SECONDS)
        return self.known.setdefault(place, Route(prepared, Take(1, Command(here.keyspace, call)), allotment))


class Question(NamedTuple):
    """What a face asks."""

    identity: Identity
    scope: str
    method: str
    costs: Mapping[str, int]
    at_once: bool


_routes = Routes()


def may_wait() -> bool:
    """Whether a rule of those that this process knows lets requests wait."""
    return _routes.waits


def by(snapshot: Snapshot) -> Routes:
    """The routes by this snapshot."""
    global _routes
    routes = _routes
    if routes.snapshot is not snapshot:
        routes = _routes = Routes(snapshot)
    return routes


def _call(snapshot: Snapshot, version: int | None, prepared: Prepared, question: Question) -> Call:
    identity, costs = question.identity, tuple(question.costs.values())
    timezone, anchor, periods = snapshot.billing(identity.account)
    keys = tuple([getattr(identity, field, field) for field in prepared.fields])
    owner = identity.owner
    usage = Usage(owner, booked_to(identity), prepared.meters, periods, timezone, anchor)
    return Call(prepared.program, keys, costs, owner, usage, version=version, at_once=question.at_once)


def booked_to(identity: Identity) -> str:
    """The key that usage is counted under: without an account to bill, all of it together."""
    return (identity.narrowest if identity.account is not None else None) or ANONYMOUS
