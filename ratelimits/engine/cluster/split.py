"""Decide a call on a cluster, shard by shard. If an enforced limit refuses, no limit is charged in the end.

A shard is a part of the accounts. All Redis keys of a shard are in one slot of the cluster, so they are on one node.
The shards of a call are decided one after the other. The last shard is the account's shard, or the shard of the
request's key if there is no account. Only this shard counts the request.

If a shard refuses, the permits that were taken in earlier shards are given back. The answer lists all limits. So the
app also asks the later shards what their limits have left, without charging them (a peek). The last shard counts the
refusal.

This module does no I/O. `steps` yields each command with the slot of its node, and receives the reply.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from redis.crc import key_slot
from redis.exceptions import RedisError, ResponseError

from ratelimits.algorithms.limits import Mode
from ratelimits.engine import memory
from ratelimits.engine.call import Call, Op, Receipt, Usage, new_nonce, shard, shard_of_usage
from ratelimits.engine.clock import clock
from ratelimits.engine.command import Command
from ratelimits.engine.counting import Count, RefusalCount, in_bounds
from ratelimits.engine.decision import DECIDED, HEAD, NOT_VALID_NOW, PER_LIMIT, RECEIPT_USED, read
from ratelimits.engine.keys import Keyspace, account_shard
from ratelimits.engine.program import Term, program
from ratelimits.engine.transport.connection import Unavailable
from ratelimits.logs import bounded

logger = bounded(__name__)

#: For how many seconds after a charge its permits can be given back. The app gives them back as soon as a later shard
#: refuses.
_GIVE_BACK_TTL = 60.0

#: The retry_after of a request that can never be admitted.
NEVER = -1

#: The numbers of a reply. lua/decide.lua lists them at "Returns".
Reply = tuple[int, ...]
#: The replies to the parts of a call, by the position of the part.
Replies = dict[int, Reply]
#: A slot, and the command for the node that has it.
Sent = tuple[int, Command | Count]
#: A generator that yields commands, receives their replies and returns one reply.
Sending = Generator[Sent, bytes, Reply]


class ShardPart(NamedTuple):
    """The part of a call in one shard.

    slot     the slot of the cluster that contains the shard's Redis keys
    limits   positions of the part's limits in the whole call
    keys     positions of the part's keys in the whole call
    command  the command that decides this part
    """

    slot: int
    limits: tuple[int, ...]
    keys: tuple[int, ...]
    command: Command


def _of_limit(index: int) -> slice:
    """Return where a reply has the numbers of a limit: ok, remaining and reset_after."""
    start = HEAD + PER_LIMIT * index
    return slice(start, start + PER_LIMIT)


def _ok(reply: Reply, index: int) -> int:
    """Return 1 if a limit admitted the request, otherwise 0."""
    return reply[_of_limit(index)][0]


def _is_admitted(reply: Reply) -> bool:
    return reply[:2] == (DECIDED, 1)


def slot_of(keyspace: Keyspace, shard_id: int) -> int:
    """Return the slot of the cluster that contains a shard's Redis keys."""
    return key_slot(keyspace.prefix(shard_id).encode())


def parts(command: Command) -> tuple[ShardPart, ...]:
    """Return the parts of a call in the order in which they are decided. The command caches them."""
    if command.parts is None:
        command.parts = tuple(_split(command.keyspace, command.call))
    cached: tuple[ShardPart, ...] = command.parts
    return cached


def _split(keyspace: Keyspace, call: Call) -> list[ShardPart]:
    terms = call.program.terms
    shards = [shard(keyspace, key, call.account, call.in_account) for key in call.keys]
    order = list(dict.fromkeys(shards[term.key] for term in terms))
    # The shard that counts the request comes last, even if it has no limit of the call. If the call is not counted, the
    # account's shard comes last, but only if it has a limit. If no shard has one, the shard of the request is asked.
    usage = call.usage
    last_shard: int | None = None
    if usage is not None:
        last_shard = shard_of_usage(keyspace, usage)
    elif call.account:
        last_shard = account_shard(call.account, keyspace.shards)
    is_asked = usage is not None and (usage.counted or not order)
    if last_shard is not None and (last_shard in order or is_asked):
        order = [*(shard_id for shard_id in order if shard_id != last_shard), last_shard]
    shard_parts = []
    for shard_id in order:
        limits = tuple(i for i, term in enumerate(terms) if shards[term.key] == shard_id)
        keys = tuple(sorted({terms[i].key for i in limits}))
        receipt = call.receipt
        if receipt is not None and receipt.moments and keys:
            receipt = replace(receipt, at=receipt.moments[keys[0]])
        part_call = call._replace(
            program=program(tuple(replace(terms[i], key=keys.index(terms[i].key)) for i in limits)),
            keys=tuple(call.keys[key] for key in keys),
            usage=usage if shard_id == last_shard else None,
            receipt=receipt,
        )
        shard_parts.append(ShardPart(slot_of(keyspace, shard_id), limits, keys, Command(keyspace, part_call)))
    return shard_parts


def steps(whole_command: Command, nonce: bytes) -> Sending:
    """Yield the commands for a call in several shards. Return a reply as if one shard had decided the call.

    If a command fails, the caller throws the error of this command into this generator. The generator then gives back
    the permits that the call has taken in earlier shards, and raises the error again.
    """
    if whole_command.call.op is Op.TRY:
        return _try(whole_command, nonce)
    return _settle(whole_command) if whole_command.call.op is Op.SETTLE else _decide_parts(whole_command)


def _decide_part(part: ShardPart, command: Command) -> Sending:
    reply = read((yield part.slot, command))
    if reply[0] == NOT_VALID_NOW and command.call.now is None:
        # Nothing was decided, because this node's clock differs from `clock`: each node has a clock of its own.
        clock.correct(reply[1])
        reply = read((yield part.slot, command))
    if reply[0] == DECIDED:
        command.is_first = False
    return reply


def _decide_parts(whole_command: Command) -> Sending:
    """Yield the commands of a call that takes no permits. They can be sent again without harm."""
    replies: Replies = {}
    for position, part in enumerate(parts(whole_command)):
        replies[position] = yield from _decide_part(part, part.command)
        if replies[position][0] != DECIDED:
            return replies[position]
    return _combined(whole_command.call, parts(whole_command), replies)


def _settle(whole_command: Command) -> Sending:
    """Yield the commands that refund or settle a receipt, one for each shard. Each shard accepts a receipt only once.

    Only the reply of the last shard says whether the receipt was used before. If an earlier shard replies that the
    receipt was used, go on: perhaps an earlier call has failed after this shard. Then this call does the rest.
    """
    replies: Replies = {}
    all_parts = parts(whole_command)
    for position, part in enumerate(all_parts):
        reply = yield from _decide_part(part, part.command)
        if reply[0] == DECIDED:
            replies[position] = reply
        elif reply[0] != RECEIPT_USED or part is all_parts[-1]:
            return reply
    return _combined(whole_command.call, all_parts, replies)


def _leaves_traces(part: ShardPart) -> bool:
    """Return whether this part has a limit whose state is not fully restored when permits are given back."""
    return not all(term.algorithm.can_be_undone for term in part.command.call.program.terms)


def _try(whole_command: Command, nonce: bytes) -> Sending:
    call, all_parts = whole_command.call, parts(whole_command)
    if any(map(_leaves_traces, all_parts[:-1])):
        # Giving back would leave traces, so avoid it: first peek at all shards. If all admit, a shard can still refuse
        # after this, but only if another call changes this shard's states in the meantime.
        reply = yield from _decide_parts(Command(whole_command.keyspace, call._replace(op=Op.PEEK)))
        if not _is_admitted(reply):
            yield from _count_denied(whole_command, reply)
            return reply
    replies: Replies = {}
    position = 0
    try:
        for position, part in enumerate(all_parts):
            replies[position] = yield from _decide_part(part, part.command)
            if not _is_admitted(replies[position]):
                break
    except (Unavailable, RedisError) as error:
        if isinstance(error, ResponseError) and memory.is_refusal(error):
            memory.note_refusal()  # so that the permits are given back also on full nodes
        yield from _give_back(whole_command, replies, position, nonce)
        raise
    newest_reply = replies[position]
    if not _is_admitted(newest_reply):
        yield from _give_back(whole_command, replies, position, nonce)
        if newest_reply[0] != DECIDED:
            return newest_reply
        yield from _peek(whole_command, replies, position)
    reply = _combined(call, all_parts, replies)
    if reply[1] == 1:
        yield from _count_shadowed(whole_command, reply)
    elif position < len(all_parts) - 1:
        yield from _count_denied(whole_command, reply)
    return reply


def _give_back(whole_command: Command, replies: Replies, until: int, nonce: bytes) -> Generator[Sent, bytes, None]:
    """Give back the permits that were taken for the parts before the position `until`, with one command for each part.

    If this fails for a part, log an error. The permits of this part stay taken.
    """
    for position in range(until):
        part, charging_reply = parts(whole_command)[position], replies[position]
        terms = part.command.call.program.terms
        costs = part.command.call.costs
        # Leave out limits that were not charged: shadow limits that would have refused the request, and limits with
        # the cost 0. (The slot of a term is the position of its cost, not a slot of the cluster.)
        charged = [i for i, term in enumerate(terms) if _ok(charging_reply, i) and costs[term.slot]]
        if not charged:
            continue
        charged_at = charging_reply[7]  # the moment of the decision
        undo = _undo(part.command.call, tuple(terms[i] for i in charged), charged_at, nonce.decode())
        try:
            reply = yield from _decide_part(part, Command(whole_command.keyspace, undo))
        except (Unavailable, RedisError) as error:
            logger.error("The permits taken in slot %d were not given back: %s", part.slot, error)
            continue
        if reply[0] != DECIDED:
            logger.error("The permits taken in slot %d were not given back: the node answered %s", part.slot, reply)
            continue
        # Report what the limits have left after the permits were given back. Leave `ok` as it was.
        corrected = list(charging_reply)
        for index, i in enumerate(charged):
            _ok_now, remaining, reset_after = reply[_of_limit(index)]
            corrected[_of_limit(i)] = (_ok(charging_reply, i), remaining, reset_after)
        replies[position] = tuple(corrected)


def _undo(call: Call, terms: tuple[Term, ...], at: int, nonce: str) -> Call:
    """Return the call that gives back the permits that `call` took under these terms at the moment `at` (µs)."""
    lease = nonce if call.lease is None else call.lease
    limits = program(terms)
    # Use a new nonce. The nonce of the request names the request's receipt, which must stay usable.
    receipt = Receipt(
        nonce=new_nonce().decode(),
        program=limits,
        keys=call.keys,
        costs=call.costs,
        account=call.account,
        in_account=call.in_account,
        usage=None,
        at=at,
        bin=0,  # without usage there is no bin
        lease=lease,
    )
    return call._replace(
        program=limits,
        op=Op.SETTLE,
        costs=tuple(-cost for cost in call.costs),
        timeout=0,
        lease=lease,
        receipt=receipt,
        # Do not refund the receipt as a whole: such a refund ends all leases with this name, also older ones.
        whole=False,
        at_once=False,
        receipt_ttl=_GIVE_BACK_TTL,
    )


def _peek(whole_command: Command, replies: Replies, refusing_position: int) -> Generator[Sent, bytes, None]:
    """Yield peeks at the parts after the position `refusing_position`, whose part has refused the request.

    If a peek fails, the request is still refused.
    """
    for position, part in enumerate(parts(whole_command)[refusing_position + 1 :], refusing_position + 1):
        if not part.limits:
            continue
        peek = Command(whole_command.keyspace, part.command.call._replace(op=Op.PEEK, usage=None))
        try:
            reply = yield from _decide_part(part, peek)
        except (Unavailable, RedisError):
            continue
        if reply[0] == DECIDED:
            replies[position] = reply


def _count_denied(whole_command: Command, reply: Reply) -> Generator[Sent, bytes, None]:
    """Yield the command with which the last shard counts a refusal by an earlier shard."""
    call, usage = whole_command.call, whole_command.call.counted
    if usage is not None and reply[0] == DECIDED and call.counts_refusal:
        term = call.program.terms[reply[2] - 1]  # the binding limit
        counted = RefusalCount(usage, call.costs[: len(usage.meters)], term.rule, term.version, requests=1)
        yield from _count(whole_command, usage, "d", [counted])


def _count_shadowed(whole_command: Command, reply: Reply) -> Generator[Sent, bytes, None]:
    """Yield the command that counts an admitted request if shadow rules in other shards would have refused it."""
    call, usage = whole_command.call, whole_command.call.counted
    if usage is None:
        return
    counted = []
    # The last shard has counted its own limits.
    earlier_limits = [i for part in parts(whole_command)[:-1] for i in part.limits]
    for i in earlier_limits:
        term = call.program.terms[i]
        if not _ok(reply, i) and term.slot < len(usage.meters):
            usage_in_meter = usage._replace(meters=(usage.meters[term.slot],))
            counted.append(RefusalCount(usage_in_meter, (call.costs[term.slot],), term.rule, term.version, requests=1))
    if counted:
        yield from _count(whole_command, usage, "s", counted)


def _count(
    whole_command: Command, usage: Usage, kind: Literal["d", "s"], counted: list[RefusalCount]
) -> Generator[Sent, bytes, None]:
    shard_id = shard_of_usage(whole_command.keyspace, usage)
    for group in in_bounds(counted):
        command = Count(whole_command.keyspace.head(shard_id), whole_command.keyspace.open(shard_id), kind)
        for item in group:
            command.add(item)
        try:
            yield slot_of(whole_command.keyspace, shard_id), command
        except (Unavailable, RedisError) as error:
            logger.error("A refusal or shadow refusal by another shard than the account's was not counted: %s", error)


def _order_of_refusal(retry_and_limit: tuple[int, int]) -> tuple[bool, int, int]:
    """Return a sort key: refusals that never end come first, then the longest refusals."""
    retry_after, limit = retry_and_limit
    return (False, 0, limit) if retry_after == NEVER else (True, -retry_after, limit)


def _combined(call: Call, all_parts: Sequence[ShardPart], replies: Replies) -> Reply:
    """Make one reply of the shards' replies: first the numbers that decide.lua returns, then a moment for each key.

    This moment is when the key's shard made its decision.
    """
    terms = call.program.terms
    #: For each limit: ok, remaining, reset_after. Limits of a shard that did not reply keep these values.
    standings: list[Reply] = [(1, 0, 0)] * len(terms)
    #: For each enforced limit: remaining, position of the limit, reset_after.
    enforced: list[tuple[int, int, int]] = []
    moments = [0] * len(call.keys)
    #: For each shard that refuses: retry_after, and the position of the shard's binding limit in the whole call.
    refusals: list[tuple[int, int]] = []
    wait = at = now = 0
    for position, part in enumerate(all_parts):
        reply = replies.get(position)
        if reply is None:
            continue
        _kind, allowed, part_binding, _remaining, retry_after, _reset_after, part_wait, at, now = reply[:HEAD]
        wait = max(wait, part_wait)
        for index, i in enumerate(part.limits):
            standings[i] = reply[_of_limit(index)]
            if terms[i].mode is Mode.ENFORCE:
                _ok, limit_remaining, limit_reset_after = standings[i]
                enforced.append((limit_remaining, i, limit_reset_after))
        for key in part.keys:
            moments[key] = at
        if allowed != 1:
            refusals.append((retry_after, part.limits[part_binding - 1]))
    binding = remaining = retry = reset = 0
    # A reply counts its limits from 1, and 0 stands for no binding limit.
    if enforced:
        remaining, limit_position, _reset = min(enforced)
        binding, reset = limit_position + 1, max(reset_after for _remaining, _i, reset_after in enforced)
    if refusals:
        # The binding limit is the first limit that never admits, or else the limit that refuses for the longest time.
        retry, limit_position = min(refusals, key=_order_of_refusal)
        binding, wait = limit_position + 1, 0
    head = (DECIDED, int(not refusals), binding, remaining, retry, reset, wait, at, now)
    return (*head, *(value for standing in standings for value in standing), *moments)
