"""Answer a request: find the rules that apply, and let the engine decide.

If the engine cannot decide, the failure policies of the rules answer. Every entry point (the throttle class, the
middleware, the decorators) calls `check` or `acheck`.
"""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter_ns

from django.db.models.signals import post_migrate
from redis.exceptions import ResponseError

from ratelimits import rules
from ratelimits.answers import observing
from ratelimits.answers.answer import PASSED, Answer
from ratelimits.conf import conf
from ratelimits.engine import Decision, Full, Lost, Stale, Unanswered, Unavailable
from ratelimits.engine.call import Call
from ratelimits.engine.command import Command
from ratelimits.engine.decide import adecide_call, decide_call
from ratelimits.engine.server import breaker, current_server, note_failure
from ratelimits.identity import Identity
from ratelimits.logs import bounded
from ratelimits.quota import from_memory, shortage, spending, without_decision
from ratelimits.quota.costs import ONE_REQUEST, check_meters, forget_meters, need_newer_rules, valid_costs
from ratelimits.quota.counting import counting
from ratelimits.quota.from_memory import denials
from ratelimits.quota.prefetch import Fetch, PrefetchedPermits
from ratelimits.quota.prepared import (
    Prepared,
    PreparedCommand,
    PreparedCommands,
    RequestShape,
    commands_by,
    usage_key,
    without_limits,
    without_version,
)
from ratelimits.rules import RulesUnavailable, Selection, Snapshot
from ratelimits.signals import request_refused

logger = bounded(__name__)

#: Redis is asked again for the same request if the rules in memory were too old, if a prefetch for several requests was
#: refused, or after lost counts were restored. After RELOADS repetitions there is one last call, which does not compare
#: versions. Its rules are new enough, because they were read after the request had come. Without a last call, rules
#: that are edited again and again could prevent a decision.
RELOADS = 3
_ATTEMPTS = range(1 + RELOADS + 1)  # the first call, its repetitions, and the last call

#: `_new(Answer, values)` makes an Answer from the values of all its fields, in half the time of `Answer(…)`.
_new = tuple.__new__


def forget(**kwargs: object) -> None:
    """Forget the refusals, failures and permits that this process remembers: the tables were made anew."""
    denials.clear()
    spending.clear()
    counting.forget()
    breaker.succeeded()
    forget_meters()
    without_decision.local.clear()


post_migrate.connect(forget, dispatch_uid="ratelimits.quota.checking")


def check(
    identity: Identity,
    scope: str = "*",
    method: str = "",
    costs: Mapping[str, int] = ONE_REQUEST,
    *,
    at_once: bool = False,
) -> Answer:
    """Decide and count one request.

    identity  who makes the request
    scope     the scope of the view, on which the rules depend
    method    the HTTP method
    costs     the cost of the request in each meter
    at_once   true if the request must not wait. If it would have to wait, it is refused and not charged

    If prefetching is on for all rules of the request, the request can spend prefetched permits. Then it is counted up
    to a second after its decision. If Redis cannot be asked, the rules' failure policies answer. Raise WrongCost for
    costs that are not valid, or name a meter that is not known (see `quota.costs`). If ENABLED is False, every request
    passes.
    """
    if not conf.ENABLED:
        return PASSED
    if identity.unreadable:
        counting.add("unreadable", "", identity.unreadable[0], ONE_REQUEST)
    if observing.observers:
        started = perf_counter_ns()
        answer = _decide(identity, scope, method, costs, at_once)
        observing.observe(answer, scope, started, perf_counter_ns())
    else:
        answer = _decide(identity, scope, method, costs, at_once)
    if not answer.allowed and request_refused.receivers:
        observing.refused(answer, identity, scope, method)
    return answer


def _decide(identity: Identity, scope: str, method: str, costs: Mapping[str, int], at_once: bool) -> Answer:
    costs = costs if costs is ONE_REQUEST else valid_costs(costs)
    # Requests with the same cache key are decided by the same command.
    cache_key: tuple[object, ...] = identity, scope, method, at_once
    cache_key = cache_key if costs is ONE_REQUEST else (*cache_key, *costs.items())
    if denials.refusals and cache_key in denials.refusals and (denied := denials.repeat(cache_key)) is not None:
        return from_memory.repeated_refusal(denied)
    prepared = None
    try:
        for attempt in _ATTEMPTS:
            snapshot = rules.current()
            commands = commands_by(snapshot)
            ready = commands.by_key.get(cache_key)
            if ready is None:
                chosen = _choose(commands, snapshot, scope, method, identity, costs)
                if isinstance(chosen, Answer):
                    return chosen
                shape = RequestShape(identity, scope, method, costs, at_once)
                by_key = commands.by_key
                ready = commands.make(shape, chosen)
                prepared = ready.prepared  # for the failure policies, if Redis cannot be asked what is affordable
                ready = shortage.affordable(commands, by_key, snapshot, shape, ready, breaker)
            prepared, _costs, fetch, permits, zero_refusal, _decides = ready
            # Redis is not asked before this refusal, so it cannot say that the rules are too old. If this process has
            # edited rules, first read them again.
            if zero_refusal is not None and (commands.includes_own_edits or not from_memory.reread(commands)):
                return from_memory.refused_by_zero(zero_refusal, prepared)
            if permits is not None:
                spent = permits.spend()
                if spent is not None:
                    return _new(Answer, (True, spent, prepared, 0.0, 0.0, False, None))
                fetch = permits.next_fetch(again=attempt > 0)
            if breaker.failures and not breaker.closed:
                break
            command = fetch.command if attempt <= RELOADS else without_version(fetch.command)
            try:
                decision = _ask(command, ready, identity)
            except (Stale, Lost, Full) as reason:
                _bring_up_to_date(reason, command.call, prepared, identity, snapshot)
                continue
            answer = (
                _answer(decision, ready, cache_key, identity)
                if permits is None
                else _answer_to_fetch(decision, ready, permits, fetch, cache_key, identity)
            )
            if answer is not None:
                return answer
        else:
            logger.error("Redis did not accept the rules or the restored counts, %s times in a row", len(_ATTEMPTS))
    except BaseException as error:  # noqa: BLE001  (_after_failure raises it again if no failure policy can answer)
        return _after_failure(error, prepared, identity, scope, method, costs)
    return without_decision.answer(prepared, identity, scope, method, costs, metered=True)


async def acheck(
    identity: Identity,
    scope: str = "*",
    method: str = "",
    costs: Mapping[str, int] = ONE_REQUEST,
    *,
    at_once: bool = False,
) -> Answer:
    """Do the same as `check`, in async code. If the caller is cancelled, the request is not charged."""
    if not conf.ENABLED:
        return PASSED
    if identity.unreadable:
        counting.add("unreadable", "", identity.unreadable[0], ONE_REQUEST)
    if observing.observers:
        started = perf_counter_ns()
        answer = await _adecide(identity, scope, method, costs, at_once)
        observing.observe(answer, scope, started, perf_counter_ns())
    else:
        answer = await _adecide(identity, scope, method, costs, at_once)
    if not answer.allowed and request_refused.receivers:
        await observing.arefused(answer, identity, scope, method)
    return answer


async def _adecide(identity: Identity, scope: str, method: str, costs: Mapping[str, int], at_once: bool) -> Answer:
    costs = costs if costs is ONE_REQUEST else valid_costs(costs)
    # Requests with the same cache key are decided by the same command.
    cache_key: tuple[object, ...] = identity, scope, method, at_once
    cache_key = cache_key if costs is ONE_REQUEST else (*cache_key, *costs.items())
    if denials.refusals and cache_key in denials.refusals and (denied := denials.repeat(cache_key)) is not None:
        return from_memory.repeated_refusal(denied)
    prepared = None
    try:
        for attempt in _ATTEMPTS:
            snapshot = await rules.acurrent()
            commands = commands_by(snapshot)
            ready = commands.by_key.get(cache_key)
            if ready is None:
                chosen = await _achoose(commands, snapshot, scope, method, identity, costs)
                if isinstance(chosen, Answer):
                    return chosen
                shape = RequestShape(identity, scope, method, costs, at_once)
                by_key = commands.by_key
                ready = commands.make(shape, chosen)
                prepared = ready.prepared
                ready = await shortage.aaffordable(commands, by_key, snapshot, shape, ready, breaker)
            prepared, _costs, fetch, permits, zero_refusal, _decides = ready
            # Redis is not asked before this refusal, so it cannot say that the rules are too old. If this process has
            # edited rules, first read them again.
            if zero_refusal is not None and (commands.includes_own_edits or not await from_memory.areread(commands)):
                return from_memory.refused_by_zero(zero_refusal, prepared)
            if permits is not None:
                spent = permits.spend()
                if spent is not None:
                    return _new(Answer, (True, spent, prepared, 0.0, 0.0, False, None))
                fetch = permits.next_fetch(again=attempt > 0)
            if breaker.failures and not breaker.closed:
                break
            command = fetch.command if attempt <= RELOADS else without_version(fetch.command)
            try:
                decision = await _aask(command, ready, identity)
            except (Stale, Lost, Full) as reason:
                await _abring_up_to_date(reason, command.call, prepared, identity, snapshot)
                continue
            answer = (
                _answer(decision, ready, cache_key, identity)
                if permits is None
                else await _aanswer_to_fetch(decision, ready, permits, fetch, cache_key, identity)
            )
            if answer is not None:
                return answer
        else:
            logger.error("Redis did not accept the rules or the restored counts, %s times in a row", len(_ATTEMPTS))
    except BaseException as error:  # noqa: BLE001  (_after_failure raises it again if no failure policy can answer)
        return _after_failure(error, prepared, identity, scope, method, costs)
    return without_decision.answer(prepared, identity, scope, method, costs, metered=True)


def _ask(command: Command, ready: PreparedCommand, identity: Identity) -> Decision:
    """Return the decision of Redis.

    First take the permits of the rules that are left out of it. Raise RefusedByPolicy if one of these rules refuses.
    Then Redis is only asked whether it has newer rules.
    """
    if not ready.prepared.left_out or not ready.decides:
        return decide_call(current_server(), command.call, command)
    with without_decision.held(ready.prepared, identity, ready.costs) as held:
        command = command if held.refusal is None else without_limits(command)
        return held.unless_refused(decide_call(current_server(), command.call, command))


async def _aask(command: Command, ready: PreparedCommand, identity: Identity) -> Decision:
    if not ready.prepared.left_out or not ready.decides:
        return await adecide_call(current_server(), command.call, command)
    with without_decision.held(ready.prepared, identity, ready.costs) as held:
        command = command if held.refusal is None else without_limits(command)
        return held.unless_refused(await adecide_call(current_server(), command.call, command))


def _bring_up_to_date(
    reason: Stale | Lost | Full, call: Call, prepared: Prepared, identity: Identity, snapshot: Snapshot
) -> None:
    """Do what Redis requires before it decides: read newer rules, or restore lost counts from the ledger.

    If its memory is full, there is nothing to do: the commands of this process were forgotten.
    """
    breaker.succeeded()
    if isinstance(reason, Stale):
        rules.reload(reason.version)
    elif isinstance(reason, Lost):
        counting.restore(call, prepared, identity, snapshot)


async def _abring_up_to_date(
    reason: Stale | Lost | Full, call: Call, prepared: Prepared, identity: Identity, snapshot: Snapshot
) -> None:
    breaker.succeeded()
    if isinstance(reason, Stale):
        await rules.areload(reason.version)
    elif isinstance(reason, Lost):
        await counting.arestore(call, prepared, identity, snapshot)


def _choose(
    commands: PreparedCommands,
    snapshot: Snapshot,
    scope: str,
    method: str,
    identity: Identity,
    costs: Mapping[str, int],
) -> Answer | Selection:
    """Return the answer of a request's block or allow. If the request has neither, return the rules that apply.

    Raise WrongCost if the request names a meter that is not known.
    """
    if costs is not ONE_REQUEST:  # the meter "requests" is always known
        if need_newer_rules(costs, snapshot):
            snapshot = rules.reload()
            commands = commands_by(snapshot)
        check_meters(costs, snapshot)
    answer = from_memory.by_row(commands, identity, costs)
    if answer is not None:
        return answer
    selection = snapshot.select(scope, method, identity)
    return _by_newer_row(selection, snapshot, identity, costs) or selection


async def _achoose(
    commands: PreparedCommands,
    snapshot: Snapshot,
    scope: str,
    method: str,
    identity: Identity,
    costs: Mapping[str, int],
) -> Answer | Selection:
    if costs is not ONE_REQUEST:
        if need_newer_rules(costs, snapshot):
            snapshot = await rules.areload()
            commands = commands_by(snapshot)
        check_meters(costs, snapshot)
    answer = await from_memory.aby_row(commands, identity, costs)
    if answer is not None:
        return answer
    selection = await rules.aselect(snapshot, scope, method, identity)
    return _by_newer_row(selection, snapshot, identity, costs) or selection


def _by_newer_row(
    selection: Selection, snapshot: Snapshot, identity: Identity, costs: Mapping[str, int]
) -> Answer | None:
    """Return the answer of a block or allow that is newer than `snapshot`; None if there is none.

    If the selection is newer than `snapshot`, its command has the newer version. So Redis does not report that
    `snapshot` is too old. In this case, look for a block or allow in the newest rules that this process has read.
    """
    if selection.version in (None, snapshot.version):
        return None
    return from_memory.by_row(commands_by(rules.current()), identity, costs, again=False)


def _answer(decision: Decision, ready: PreparedCommand, cache_key: tuple[object, ...], identity: Identity) -> Answer:
    """Return the answer to a request after Redis has answered."""
    if breaker.failures:
        breaker.succeeded()
    prepared, costs, _fetch, _permits, _zero_refusal, decides = ready
    if not decides:
        return without_decision.by_policies(prepared, identity, costs, metered=True)
    reply = decision.reply
    # `reply[1] == 1` means `decision.allowed`, and `reply[8]` is `decision.counted_at`. The properties would be slower.
    if reply[1] == 1:
        counting.admitted(identity.account, costs, reply[8])
        wait = decision.wait if prepared.waits else 0.0
        return _new(Answer, (True, decision, prepared, 0.0, wait, False, None))
    return from_memory.refused(decision, prepared, cache_key)


def _answer_to_fetch(
    decision: Decision,
    ready: PreparedCommand,
    permits: PrefetchedPermits,
    fetch: Fetch,
    cache_key: tuple[object, ...],
    identity: Identity,
) -> Answer | None:
    """Take the permits of a fetch, count requests that spent earlier permits, and return the answer to this request.

    Return None if a fetch for several requests was refused. Then the caller fetches again for one request.
    """
    taken = permits.take(fetch, decision)
    if taken is None:
        return None
    decision, prefetch = taken
    answer = _answer(decision, ready, cache_key, identity)
    spending.send(permits, prefetch)
    return answer


async def _aanswer_to_fetch(
    decision: Decision,
    ready: PreparedCommand,
    permits: PrefetchedPermits,
    fetch: Fetch,
    cache_key: tuple[object, ...],
    identity: Identity,
) -> Answer | None:
    taken = permits.take(fetch, decision)
    if taken is None:
        return None
    decision, prefetch = taken
    answer = _answer(decision, ready, cache_key, identity)
    await spending.asend(permits, prefetch, decision)
    return answer


def _after_failure(
    error: BaseException,
    prepared: Prepared | None,
    identity: Identity,
    scope: str,
    method: str,
    costs: Mapping[str, int],
) -> Answer:
    """Return the answer after a failed call. Raise the error again if no failure policy can answer."""
    if isinstance(error, without_decision.RefusedByPolicy):
        return error.answer
    _note_failure(error, identity, costs)
    return without_decision.answer(prepared, identity, scope, method, costs, metered=True)


def _note_failure(error: BaseException, identity: Identity, costs: Mapping[str, int]) -> None:
    """Note a failed call in the breaker and the process totals. Raise the error again if no failure policy can answer.

    If `error` says that the caller was cancelled or stopped, its `__cause__` is the engine's error.
    """
    policy_answers = isinstance(error, (RulesUnavailable, Unavailable, ResponseError))
    cause = error if policy_answers else error.__cause__
    note_failure(cause)
    if isinstance(cause, Unanswered):
        counting.add("unanswered", identity.account_id, usage_key(identity), costs)
    if not policy_answers:
        raise error
    logger.error("There is no decision, so the failure policy decides. The reason: %s", error)
