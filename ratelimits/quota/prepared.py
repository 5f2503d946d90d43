"""Prepared commands: what applies to requests that are alike, and the command that decides them, ready to be sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

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
from ratelimits.quota.prefetch import Fetch, PrefetchedPermits
from ratelimits.rules import AppliedRule, Selection, Snapshot, UnreadableRule

#: Maximum number of prepared commands that a process keeps. Beyond it the cache is emptied.
MAX_COMMANDS = 8192
#: Maximum number of combinations of meters for which a selection is kept prepared. A view may take names of meters from
#: its clients. Beyond it they are prepared again.
MAX_METERINGS = 64
ANONYMOUS = "anonymous"


@dataclass(frozen=True, slots=True)
class Prepared:
    """The rules of a selection for certain meters, with everything that is the same for all their requests.

    fields       the attributes of Identity, or "global", that the program's keys come from
    waits        whether a rule may let a request wait
    leases       whether a rule gives leases, which end with their request
    prefetch     maximum number of requests whose permits one fetch may take; 0 unless all rules prefetch
    unreadable   rules that cannot be read: their failure policies decide instead
    undecidable  why the rules cannot be decided together, so that all their failure policies decide; "" if they can
    """

    rules: tuple[AppliedRule, ...]
    program: Program
    fields: tuple[str, ...]
    meters: tuple[Meter, ...]
    waits: bool
    leases: bool
    prefetch: int
    policies: str
    quoted: tuple[str, ...]
    unreadable: tuple[UnreadableRule, ...] = ()
    undecidable: str = ""

    def unavailable(self, costs: Mapping[str, int]) -> bool:
        """Return whether the failure policy decides a request with these costs, whatever the server says."""
        return bool(self.undecidable) or any(one.refuses and costs[one.meter] > 0 for one in self.unreadable)


def prepare(selection: Selection, meters: tuple[str, ...]) -> Prepared:
    """Return what applies of a selection to requests that these meters count. Made once for each."""
    prepared: Prepared | None = selection.cache.get(meters)
    if prepared is None:
        if len(selection.cache) >= MAX_METERINGS:
            selection.cache.clear()
        prepared = selection.cache[meters] = _prepare(selection, meters)
    return prepared


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
    leases = any(rule.algorithm.leases for rule in applied)
    quoted = tuple(headers.quoted(rule.name) for rule in applied)
    prefetch = min((rule.prefetch if _may_prefetch(rule) else 0 for rule in applied), default=0)
    unreadable = tuple(rule for rule in selection.unreadable if rule.meter in meters)
    undecidable = ""
    try:
        compiled = program(terms)
    except ValueError as error:
        compiled, prefetch, undecidable = program(()), 0, str(error)
    policies = headers.policies(shown)
    return Prepared(
        applied, compiled, fields, billed, waits, leases, prefetch, policies, quoted, unreadable, undecidable
    )


def _may_prefetch(rule: AppliedRule) -> bool:
    """Return whether a rule's permits may be prefetched. Rows that bypassed the form may ask for it wrongly."""
    return rule.mode is Mode.ENFORCE and not rule.bills and rule.algorithm.may_prefetch


class PreparedCommand(NamedTuple):
    """The command that decides one identity's requests in a scope with the same costs."""

    prepared: Prepared
    fetch: Fetch
    permits: PrefetchedPermits | None
    #: The refusal of a rule with capacity 0, for which no call is needed; None without such a rule.
    blocked: Decision | None


class PreparedCommands:
    """The prepared commands of one snapshot. A newer snapshot starts with none; MAX_COMMANDS empties the cache."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self.snapshot = snapshot
        #: Whether any rule may let a request wait. Assume it before the rules are known.
        self.waits = snapshot is None or snapshot.waits
        self.by_key: dict[tuple[object, ...], PreparedCommand] = {}
        #: The number of this process' own edits that the snapshot contains.
        self.publications = publications()

    @property
    def newest(self) -> bool:
        """Return whether this process has edited nothing since the snapshot was read."""
        return self.publications == publications()

    def add(self, cache_key: tuple[object, ...], shape: RequestShape, selection: Selection) -> PreparedCommand:
        """Prepare the command for requests of this shape, to which the selection applies, and keep it."""
        if len(self.by_key) >= MAX_COMMANDS:
            self.by_key.clear()
        prepared = prepare(selection, tuple(shape.costs))
        assert self.snapshot is not None
        server, call = current_server(), _call(self.snapshot, selection.version, prepared, shape)
        refusal = blocked(call, clock.now())
        permits = None
        if prepared.undecidable:
            self.snapshot.log_once(f"On some requests their rules' failure policies decide: {prepared.undecidable}")
        if prepared.unavailable(shape.costs):
            # The failure policy decides. The server is only asked whether these rules are still the newest.
            call = call._replace(program=program(()), keys=(), op=Op.PEEK)
        elif prepared.prefetch and conf.PREFETCH_SECONDS > 0:
            # Spent permits are not counted as usage: the server does not see when they are spent.
            unmetered = call._replace(usage=None)
            permits = PrefetchedPermits(server, unmetered, prepared.prefetch, conf.PREFETCH_SECONDS)
        fetch = Fetch(1, Command(server.keyspace, call))
        return self.by_key.setdefault(cache_key, PreparedCommand(prepared, fetch, permits, refusal))


class RequestShape(NamedTuple):
    """What two requests must have in common to share a prepared command."""

    identity: Identity
    scope: str
    method: str
    costs: Mapping[str, int]
    at_once: bool


_commands = PreparedCommands()


def may_wait() -> bool:
    """Return whether any rule that this process knows may let requests wait."""
    return _commands.waits


def commands_by(snapshot: Snapshot) -> PreparedCommands:
    """Return the prepared commands of this snapshot."""
    global _commands
    commands = _commands
    if commands.snapshot is not snapshot:
        commands = _commands = PreparedCommands(snapshot)
    return commands


def _call(snapshot: Snapshot, version: int | None, prepared: Prepared, shape: RequestShape) -> Call:
    identity, costs = shape.identity, tuple(shape.costs.values())
    timezone, anchor, kept, periods = snapshot.billing(identity.account)
    keys = tuple([getattr(identity, field, field) for field in prepared.fields])
    owner = identity.owner
    usage = Usage(owner, usage_key(identity), prepared.meters, periods, timezone, anchor, kept)
    return Call(prepared.program, keys, costs, owner, usage, version=version, at_once=shape.at_once)


def usage_key(identity: Identity) -> str:
    """Return the key under which usage is counted. Usage without an account is counted under one key together."""
    return (identity.narrowest if identity.account is not None else None) or ANONYMOUS
