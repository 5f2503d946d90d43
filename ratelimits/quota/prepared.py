"""Prepare commands: find the rules for one kind of request, and make the Redis command that decides these requests.

A prepared command stays in memory. The next request of the same kind only sends this command.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from ratelimits.algorithms.base import MICROSECONDS
from ratelimits.algorithms.limits import Lasting
from ratelimits.answers import headers
from ratelimits.conf import conf
from ratelimits.engine import Meter, Mode, Usage, memory, memory_watch
from ratelimits.engine.call import ANONYMOUS_KEY, Call, Op
from ratelimits.engine.clock import clock
from ratelimits.engine.command import Command
from ratelimits.engine.decision import Decision, refusal_by_zero_capacity
from ratelimits.engine.keys import name_id
from ratelimits.engine.program import MAX_LIMITS, Program, Term, program
from ratelimits.engine.server import current_server, publications
from ratelimits.identity import Identity, kinds_in_account
from ratelimits.quota.counting import counting
from ratelimits.quota.prefetch import Fetch, PrefetchedPermits
from ratelimits.rules import AppliedRule, Selection, Snapshot, UnreadableRule
from ratelimits.rules.selection import key_of

if TYPE_CHECKING:
    from ratelimits.answers.answer import Answer

#: Maximum number of meters of all prepared commands of a process together. (Most commands have one meter. A command
#: with many meters needs more memory.) When this number is reached, the cache is emptied.
MAX_COMMANDS = 8192
#: Maximum number of Prepared objects in the cache of a selection: one for each combination of meters. A view can take
#: the names of meters from its clients, and so many combinations of the known meters. When this number is reached, the
#: cache is emptied.
MAX_METER_COMBINATIONS = 64
#: Maximum number of rules that a message names.
_MAX_NAMES = 20


@dataclass(frozen=True, slots=True)
class Prepared:
    """The rules that limit one kind of request, and the data that all requests of this kind have in common.

    rules        the rules that are decided
    program      these rules, compiled for the engine
    key_kinds    the kind of each key of the program (see `AppliedRule.key_kind`)
    meters       the meters that count the request
    waits        whether a rule can let a request wait
    leases       whether a rule gives leases, which end with the request
    prefetch     maximum number of requests for which one fetch takes permits; 0 if a rule does not allow prefetching
    policies     the value of the header RateLimit-Policy
    quoted       the name of each rule, with quotation marks, as headers show it
    invented     the positions of those kinds in `key_kinds` whose keys a client can invent: addresses, their networks,
                 and keys that the view gives
    has_own_refusals  whether a rule has its own status or text for refusals
    shows_shadow whether the headers show shadow rules, as if these were enforced
    unreadable   rules with wrong values. The failure policy of such a rule decides. `local` refuses then, like `deny`:
                 the fallback has no valid limit to decide by
    left_out     rules that cannot be decided together with `rules` (see `_decidable`). The failure policy of each of
                 them answers instead. Shadow rules are not here: if one is left out, nothing is recorded under it
    undecided    a message with the names of all rules that are left out, and the reason; "" if there are none
    """

    rules: tuple[AppliedRule, ...]
    program: Program
    key_kinds: tuple[str, ...]
    meters: tuple[Meter, ...]
    waits: bool
    leases: bool
    prefetch: int
    policies: str
    quoted: tuple[str, ...]
    shows_shadow: bool
    has_own_refusals: bool
    invented: tuple[int, ...] = ()
    unreadable: tuple[UnreadableRule, ...] = ()
    left_out: tuple[AppliedRule, ...] = ()
    undecided: str = ""

    def unavailable(self, costs: Mapping[str, int]) -> bool:
        """Return whether a request with these costs is refused without a decision, even if Redis answers.

        Failure policies refuse it, or a rule that is left out admits nothing.
        """
        return any(rule.refuses and costs[rule.meter] > 0 for rule in self.unreadable) or any(
            costs[rule.meter] > 0 and (rule.on_failure == "deny" or rule.algorithm.admits_nothing)
            for rule in self.left_out
        )


def prepare(selection: Selection, meters: tuple[str, ...]) -> Prepared:
    """Return the Prepared object for those rules of a selection that limit these meters. The selection caches it."""
    prepared: Prepared | None = selection.cache.get(meters)
    if prepared is None:
        if len(selection.cache) >= MAX_METER_COMBINATIONS:
            selection.cache.clear()
        prepared = selection.cache[meters] = _prepare(selection, meters)
    return prepared


def _prepare(selection: Selection, meters: tuple[str, ...]) -> Prepared:
    of_these_meters = tuple(rule for rule in selection.rules if rule.meter in meters)
    applied, left_out, undecided = _decidable(of_these_meters)
    key_kinds = tuple(dict.fromkeys(rule.key_kind for rule in applied))
    terms = tuple(
        Term(
            rule.algorithm,
            rule.name,
            key=key_kinds.index(rule.key_kind),
            slot=meters.index(rule.meter),
            mode=rule.mode,
            rule=rule.rule,
            version=rule.version,
            since=rule.since,
            max_wait=int(rule.max_wait * MICROSECONDS),
            lasting=rule.lasting if counting.counts else Lasting.NO,  # without a ledger there is nothing to restore
        )
        for rule in applied
    )
    # If several rules bill a meter, the first of them stays in the dict. A rule that is left out bills as before.
    billing_rules = {rule.meter: rule for rule in reversed(of_these_meters) if rule.bills and rule.mode is Mode.ENFORCE}
    counted_meters = tuple(
        Meter(name, billing_rules[name].rule, billing_rules[name].version) if name in billing_rules else Meter(name)
        for name in meters
    )
    shows_shadow = conf.SHADOW_HEADERS and any(rule.mode is Mode.SHADOW for rule in applied)
    shown_policies = [
        headers.policy(rule.name, rule.algorithm) for rule in applied if shows_shadow or rule.mode is Mode.ENFORCE
    ]
    waits = any(rule.max_wait > 0 for rule in applied)
    leases = any(rule.algorithm.leases for rule in applied)
    quoted = tuple(headers.quoted(rule.name) for rule in applied)
    # A rule that is left out must be asked for each request, so no request spends prefetched permits.
    prefetch = 0 if left_out else min((rule.prefetch if _may_prefetch(rule) else 0 for rule in applied), default=0)
    unreadable = tuple(rule for rule in selection.unreadable if rule.meter in meters)
    policies = headers.policies(shown_policies)
    return Prepared(
        rules=applied,
        program=program(terms),
        key_kinds=key_kinds,
        meters=counted_meters,
        waits=waits,
        leases=leases,
        prefetch=prefetch,
        policies=policies,
        quoted=quoted,
        shows_shadow=shows_shadow,
        has_own_refusals=any(rule.refusal_status != 429 or rule.refusal_text for rule in applied),
        invented=tuple(i for i, kind in enumerate(key_kinds) if kind.startswith(("address", "view_key/"))),
        unreadable=unreadable,
        left_out=left_out,
        undecided=undecided,
    )


def _decidable(rules: tuple[AppliedRule, ...]) -> tuple[tuple[AppliedRule, ...], tuple[AppliedRule, ...], str]:
    """Return the rules that one decision can take; the enforced rules that it cannot take; and a message about these.

    A decision takes at most MAX_LIMITS rules. It does not take two rules of one key whose names have the same number in
    Redis. Enforced rules come before shadow rules, and otherwise earlier rules before later ones. The message also
    names the shadow rules that are left out. It is "" if the decision can take all rules.
    """
    taken: dict[tuple[str, int], AppliedRule] = {}
    for rule in sorted(rules, key=lambda rule: rule.mode is Mode.SHADOW):
        if len(taken) < MAX_LIMITS:
            taken.setdefault((rule.key_kind, name_id(rule.name)), rule)
    kept = tuple(rule for rule in rules if taken.get((rule.key_kind, name_id(rule.name))) is rule)
    if len(kept) == len(rules):
        return rules, (), ""
    enforced, shadow = (
        [rule for rule in rules if rule not in kept and rule.mode is mode] for mode in (Mode.ENFORCE, Mode.SHADOW)
    )
    message = f"a decision takes at most {MAX_LIMITS} rules, and no two names with the same CRC-32"
    if enforced:
        message += f". The failure policies answer for these rules: {_names(enforced)}"
    if shadow:
        message += f". Nothing is recorded under these shadow rules: {_names(shadow)}"
    return kept, tuple(enforced), message


def _names(rules: Sequence[AppliedRule]) -> str:
    more = ["…"] if len(rules) > _MAX_NAMES else []
    return ", ".join([*(rule.name for rule in rules[:_MAX_NAMES]), *more])


def _may_prefetch(rule: AppliedRule) -> bool:
    """Return whether a rule's permits can be prefetched. The form checks this too, but raw SQL can write a rule."""
    return rule.mode is Mode.ENFORCE and rule.algorithm.may_prefetch


class PreparedCommand(NamedTuple):
    """The command for requests with one identity, one scope and the same costs.

    `fetch` contains the command. `permits` are the prefetched permits; None if the rules do not allow prefetching.
    `costs` is never changed. `decides` is false if the command decides nothing, because a failure policy decides these
    requests. Then Redis is only asked whether it has newer rules.
    """

    prepared: Prepared
    costs: Mapping[str, int]
    fetch: Fetch
    permits: PrefetchedPermits | None
    #: The refusal of all these requests, if a rule has capacity 0. Then Redis is not asked. Otherwise None.
    zero_refusal: Decision | None
    decides: bool


#: Commands by cache key.
CommandsByKey = dict[tuple[object, ...], PreparedCommand]


class PreparedCommands:
    """The prepared commands for one snapshot (the rules at one version). A newer snapshot needs new commands."""

    def __init__(self, snapshot: Snapshot | None = None) -> None:
        self.snapshot = snapshot
        #: Whether a rule can let a request wait. True until the rules are known.
        self.waits = snapshot is None or snapshot.waits
        #: The commands by cache key.
        self.by_key: CommandsByKey = {}
        #: How many meters these commands have together. Threads can add to it at the same time: it need not be exact.
        self._meters = 0
        #: The answers of blocks and allows, by the row's id. Answers that depend on the time are not here.
        self.row_answers: dict[int, Answer] = {}
        #: How many versions of the rules this process had published when the snapshot was read.
        self.publications = publications()

    @property
    def includes_own_edits(self) -> bool:
        """Return whether the snapshot contains every edit of rules that this process has made."""
        return self.publications == publications()

    def make(self, shape: RequestShape, selection: Selection) -> PreparedCommand:
        """Prepare the command for requests of this shape. `selection` has the rules for these requests.

        The caller stores it in the `by_key` that it has read before. So if the level of memory changes meanwhile, the
        command is forgotten.
        """
        self._meters += len(shape.costs)
        if self._meters > MAX_COMMANDS:
            self.by_key.clear()
            self._meters = len(shape.costs)
        prepared = prepare(selection, tuple(shape.costs))
        assert self.snapshot is not None
        if prepared.invented:
            memory_watch.address_seen()
        server, call = current_server(), _call(selection.version, prepared, shape)
        refusal = refusal_by_zero_capacity(call, clock.now())
        permits = None
        if prepared.undecided:
            self.snapshot.log_once(f"Some rules are left out of some decisions: {prepared.undecided}")
        if prepared.unavailable(shape.costs):
            # The failure policy decides. Ask Redis only whether it has newer rules.
            call = _without_limits(call)
        elif prepared.prefetch and conf.PREFETCH_SECONDS > 0:
            permits = PrefetchedPermits(server, call, prepared.prefetch, conf.PREFETCH_SECONDS, clock.seconds())
        fetch = Fetch(1, Command(server.keyspace, call))
        # Copy the costs: a view can change its mapping later.
        costs = dict(shape.costs)
        decides = call.op is not Op.PEEK
        return PreparedCommand(prepared, costs, fetch, permits, refusal, decides)


def without_version(command: Command) -> Command:
    """Return the same command without the version of its rules, so that Redis does not compare versions."""
    return Command(current_server().keyspace, command.call._replace(version=None))


def without_limits(command: Command) -> Command:
    """Return a command that decides and counts nothing. With it, Redis only says whether it has newer rules."""
    return Command(current_server().keyspace, _without_limits(command.call))


def _without_limits(call: Call) -> Call:
    return call._replace(program=program(()), keys=(), op=Op.PEEK)


class RequestShape(NamedTuple):
    """The properties of a request that its prepared command depends on.

    `at_once` is true for a request that must not wait: it is refused if it would have to wait.
    """

    identity: Identity
    scope: str
    method: str
    costs: Mapping[str, int]
    at_once: bool


_commands = PreparedCommands()


def _prepare_again() -> None:
    """Forget the commands: whether Redis has enough memory decides what they do.

    Also forget those that are being made now: they are stored in the old dict.
    """
    _commands.by_key = {}


memory.on_change.append(_prepare_again)


def may_wait() -> bool:
    """Return whether a rule that this process knows can let requests wait."""
    return _commands.waits


def commands_by(snapshot: Snapshot) -> PreparedCommands:
    """Return the prepared commands of this snapshot."""
    global _commands
    commands = _commands
    if commands.snapshot is not snapshot:
        commands = _commands = PreparedCommands(snapshot)
    return commands


def _call(version: int | None, prepared: Prepared, shape: RequestShape) -> Call:
    identity, costs = shape.identity, tuple(shape.costs.values())
    keys = tuple([key_of(identity, kind) for kind in prepared.key_kinds])
    account = identity.account_id
    usage = Usage(account, usage_key(identity), prepared.meters, counting.counts)
    return Call(
        prepared.program,
        keys,
        costs,
        account,
        usage,
        version=version,
        at_once=shape.at_once,
        in_account=kinds_in_account(identity),
    )


def usage_key(identity: Identity) -> str:
    """Return the key under which a request's usage is counted. Without an account, return ANONYMOUS_KEY."""
    return (identity.narrowest_key if identity.account is not None else None) or ANONYMOUS_KEY
