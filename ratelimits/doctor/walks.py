"""Walk the whole way of each part of the app on the doctor's Redis keys, with the app's own scripts and functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from redis.exceptions import RedisError, ResponseError

from ratelimits.algorithms.limits import (
    Algorithm,
    CalendarWindow,
    Concurrency,
    FixedWindow,
    Gcra,
    LeakyBucket,
    LeakyBucketQueue,
    SlidingLog,
    SlidingWindow,
    SmoothBursty,
    SmoothWarmingUp,
    TokenBucket,
)
from ratelimits.doctor.findings import Part, ledger
from ratelimits.doctor.scratch import TIME_TO_LIVE, Expiring, Scratch, expiring
from ratelimits.engine import memory
from ratelimits.engine.assemble import scripts
from ratelimits.engine.call import ANY, Call, Op, new_nonce
from ratelimits.engine.command import Command, further_keys, state_keys
from ratelimits.engine.decide import parse_reply, receipt_call
from ratelimits.engine.decision import Decision, Lost, Stale
from ratelimits.engine.program import Term, program
from ratelimits.engine.transport.connection import Unavailable
from ratelimits.simulate.lines import TraceLine
from ratelimits.simulate.replay import Replay, Simulator

HOUR = Decimal(3600)
#: The algorithms that are tried together: they need the same commands.
_USUAL: tuple[Algorithm, ...] = (
    TokenBucket(2, Decimal(1), HOUR),
    Gcra(2, Decimal(1), HOUR),
    LeakyBucket(2, Decimal(1), HOUR),
    LeakyBucketQueue(100, Decimal(100), Decimal(1)),
    FixedWindow(100, HOUR),
    CalendarWindow(100, "month"),
    SlidingWindow(100, HOUR),
    SmoothBursty(Decimal(1000), Decimal(1)),
    SmoothWarmingUp(Decimal(1000), Decimal(1)),
)
#: The key of the requests that the doctor decides.
KEY = "user:doctor"
#: What a walk raises if the part does not work.
_FAILURES = (Unavailable, RedisError, OSError, Stale, Lost)


class WrongError(Exception):
    """Raised if the server answered, but not what the app needs."""


def walk(scratch: Scratch, part: Part) -> Exception | None:
    """Walk the way of a part. Return the error if it does not work."""
    failures: tuple[type[Exception], ...] = (WrongError, *_FAILURES, *ledger.failures)
    try:
        (_WALKS.get(part) or ledger.walks[part])(scratch)
    except failures as error:
        return error
    return None


def decide(scratch: Scratch, call: Call) -> Decision:
    """Decide a call on the doctor's keys, as `engine.decide` does on the project's."""
    keyspace, nonce = scratch.keyspace, new_nonce()
    command = Command(keyspace, call, full=False)
    shards = [0] * len(call.keys)
    for key in (*state_keys(keyspace, call, shards), *further_keys(keyspace, call, shards)):
        scratch.written[key] = None
    for _ in range(2):
        # The first reply can say that this process has another time than the server. `parse_reply` corrects it.
        try:
            reply = scratch.wire.call(Expiring(command), nonce)
        except ResponseError as error:
            if not memory.is_refusal(error) or not scratch.may_use_reserve:
                raise
            reply = scratch.wire.call(Expiring(Command(keyspace, call, full=True)), nonce := new_nonce())
        decision = parse_reply(call, reply, nonce)
        if decision is not None:
            return decision
    raise WrongError("the server's clock jumps: it was outside of the present billing period twice")


def _call(*algorithms: Algorithm, key: str = KEY, **more: Any) -> Call:
    terms = tuple(Term(one, f"{number}", 0, 0) for number, one in enumerate(algorithms))
    return Call(program(terms), (key,), (1,), version=None, **more)


def _admits_two(scratch: Scratch, call: Call) -> list[Decision]:
    """Decide a call with a limit of two permits three times. Raise WrongError if it is not refused the third time."""
    decisions = [decide(scratch, call) for _ in range(3)]
    admitted = [decision.allowed for decision in decisions]
    if admitted != [True, True, False]:
        raise WrongError(f"a limit of two permits answered {admitted}, and not [True, True, False]")
    return decisions


def _limits(scratch: Scratch) -> None:
    """Charge limits, and refund a charge."""
    first, *_others = _admits_two(scratch, _call(*_USUAL, timeout=ANY))
    assert first.receipt is not None
    decide(scratch, receipt_call(first.receipt, [0], receipt_ttl=60, whole=True))


def _logs(scratch: Scratch) -> None:
    _admits_two(scratch, _call(SlidingLog(2, HOUR)))


def _leases(scratch: Scratch) -> None:
    limit = Concurrency(2, Decimal(60))
    first, *_others = _admits_two(scratch, _call(limit))
    assert first.receipt is not None
    decide(scratch, _call(limit, op=Op.RELEASE, lease=first.receipt.nonce))
    if not decide(scratch, _call(limit)).allowed:
        raise WrongError("a lease that was released is not free")


def run_script(scratch: Scratch, *files: str, key: str, arguments: tuple[str, ...]) -> Any:
    """Run one of the app's scripts, which these Lua files make, on the doctor's keys."""
    return scratch.client.eval(expiring(scripts.read(*files)).text.decode(), 1, key, *arguments)


def _waits(scratch: Scratch) -> None:
    """Take from a list what a script puts into it."""
    freed = scratch.key("try-freed")
    text = "redis.call('RPUSH', KEYS[1], ARGV[1]) redis.call('PEXPIRE', KEYS[1], ARGV[2]) return 1"
    if scratch.may_use_reserve:
        text = f"{scripts.text('memory/full')}\n{text}"
    scratch.client.eval(text, 1, freed, "lease", TIME_TO_LIVE)
    if scratch.wire.pop(freed, 1.0) != b"lease":
        raise WrongError("a call that waits for a lease was not served")


def _edits(scratch: Scratch) -> None:
    """Publish a version of the rules, and read it."""
    head = scratch.keyspace.head(0)
    run_script(scratch, "memory/full", "publish", key=head, arguments=("7",))
    stored = scratch.client.get(head)
    if not stored or stored.split()[0] != b"7":
        raise WrongError(f"the published version 7 is stored as {stored!r}")


def _tries(scratch: Scratch) -> None:
    """Simulate three requests. A simulation has a namespace of its own, and deletes its keys."""
    with Simulator(scratch.all_servers) as simulator:
        replay = Replay((TokenBucket(2, Decimal(1), HOUR),))
        lines = ((replay, TraceLine(moment, moment, Op.TRY, "", 1, 0, "")) for moment in range(3))
        admitted = [outcome.allowed for _replay, _line, outcome in simulator.run(lines)]
    if admitted != [True, True, False]:
        raise WrongError(f"a simulated limit of two permits answered {admitted}")


#: The walks of the parts that need no ledger.
_WALKS: Mapping[Part, Callable[[Scratch], None]] = {
    Part.LIMITS: _limits,
    Part.LOGS: _logs,
    Part.LEASES: _leases,
    Part.WAITS: _waits,
    Part.EDITS: _edits,
    Part.TRIES: _tries,
}
