"""The routes of requests: for those that are alike, what applies to them, ready to be asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ratelimits.algorithms.limits import Concurrency
from ratelimits.algorithms.parsing import MICROSECONDS
from ratelimits.conf import conf
from ratelimits.engine import Meter, Mode, Usage
from ratelimits.engine.call import Call, Command, Op, clock
from ratelimits.engine.decision import Decision, blocked
from ratelimits.engine.program import Program, Term, program
from ratelimits.engine.publish import publications
from ratelimits.engine.server import current_server
from ratelimits.identity import Identity
from ratelimits.quota import headers
from ratelimits.quota.prefetch import Allotment, Take, lends_itself
from ratelimits.rules import AppliedRule, Selection, Snapshot, UnreadableRule

#: Routes that are remembered at most; past it, all of a process' are found anew.
MOST_ROUTES = 8192
ANONYMOUS = "anonymous"


@dataclass(frozen=True, slots=True)
class Prepared:
    """A selection for certain meters, with all that does not change from request to request.

    `leases`: whether a rule hands out leases, which end with their request. `allotment` is the most requests whose
    permits may be taken ahead: 0 unless every rule lends itself to that. In place of the `unreadable` rules their
    failure policies decide; `undecidable` is why no decision can be made of the others at all ("" if one can), so that
    the failure policies of all of them do.
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
    unreadable: tuple[UnreadableRule, ...] = ()
    undecidable: str = ""

    def unavailable(self, costs: Mapping[str, int]) -> bool:
        """Whether the failure policy decides a request at these costs, whatever the server says."""
        return bool(self.undecidable) or any(one.refuses and costs[one.meter] > 0 for one in self.unreadable)


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
    unreadable = tuple(rule for rule in selection.unreadable if rule.meter in meters)
    undecidable = ""
    try:
        compiled = program(terms)
    except ValueError as error:
        compiled, ahead, undecidable = program(()), 0, str(error)
    policies = headers.policies(shown)
    return Prepared(applied, compiled, fields, billed, waits, leases, ahead, policies, quoted, unreadable, undecidable)


def _ahead(rule: AppliedRule) -> bool:
    """Whether its permits may be taken ahead; rows that were written without a form may say what makes no sense."""
    return rule.mode is Mode.ENFORCE and not rule.bills and lends_itself(rule.algorithm)


class Route(NamedTuple):
    """The way of one identity's requests in a scope, at the same costs: what applies, ready to be asked."""

    prepared: Prepared
    take: Take
    allotment: Allotment | None
    #: The refusal that a rule of capacity 0 makes, for which nothing has to be asked.
    blocked: Decision | None


class Routes:
    """The routes by a snapshot; another snapshot starts anew, and so does one that has MOST_ROUTES."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self.snapshot = snapshot
        #: Whether any route may let a request wait; not known yet, it may.
        self.waits = snapshot is None or snapshot.waits
        self.known: dict[tuple[object, ...], Route] = {}
        #: The edits of this process that the snapshot is known to have.
        self.publications = publications()

    @property
    def newest(self) -> bool:
        """Whether this process has edited nothing since the snapshot was read."""
        return self.publications == publications()

    def learn(self, place: tuple[object, ...], question: Question, selection: Selection) -> Route:
        """The route of a question to which this selection applies, remembered."""
        if len(self.known) >= MOST_ROUTES:
            self.known.clear()
        prepared = prepare(selection, tuple(question.costs))
        assert self.snapshot is not None
        server, call = current_server(), _call(self.snapshot, selection.version, prepared, question)
        refusal = blocked(call, clock.now())
        allotment = None
        if prepared.undecidable:
            self.snapshot.log_once(f"On some requests their rules' failure policies decide: {prepared.undecidable}")
        if prepared.unavailable(question.costs):
            # The failure policy decides; what is asked is only whether these rules are still the newest.
            call = call._replace(program=program(()), keys=(), op=Op.PEEK)
        elif prepared.allotment and conf.ALLOTMENT_SECONDS > 0:
            # What is spent here cannot be counted as usage in the moment that it is decided, so none of it is.
            unmetered = call._replace(usage=None)
            allotment = Allotment(server, unmetered, prepared.allotment, conf.ALLOTMENT_SECONDS)
        take = Take(1, Command(server.keyspace, call))
        return self.known.setdefault(place, Route(prepared, take, allotment, refusal))


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
    timezone, anchor, kept, periods = snapshot.billing(identity.account)
    keys = tuple([getattr(identity, field, field) for field in prepared.fields])
    owner = identity.owner
    usage = Usage(owner, booked_to(identity), prepared.meters, periods, timezone, anchor, kept)
    return Call(prepared.program, keys, costs, owner, usage, version=version, at_once=question.at_once)


def booked_to(identity: Identity) -> str:
    """The key that usage is counted under: without an account to bill, all of it together."""
    return (identity.narrowest if identity.account is not None else None) or ANONYMOUS
