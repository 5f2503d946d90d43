"""What the doctor knows of usage: whether it is counted, brought to the ledger and restored from it; and the fence."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence

from redis.exceptions import RedisError

from ratelimits.algorithms.limits import CalendarWindow, FixedWindow, Lasting
from ratelimits.conf import conf
from ratelimits.doctor.commands import USED
from ratelimits.doctor.findings import Part, ServerFinding, Who, ledger
from ratelimits.doctor.scratch import Scratch
from ratelimits.doctor.walks import HOUR, KEY, WrongError, decide, run_script
from ratelimits.engine.call import Call, Meter, Op, Usage
from ratelimits.engine.decision import Lost
from ratelimits.engine.program import Term, program
from ratelimits.engine.transport.connection import Unavailable, read_run
from ratelimits.engine.transport.refused import refused
from ratelimits.usage.ledger.drain import read_fields
from ratelimits.usage.ledger.fence import NotFencedError, another_fence, check_server, other_fences
from ratelimits.usage.ledger.packet import Unreadable, packet

#: The account of the requests that the doctor counts.
_ACCOUNT = "doctor"


def install() -> None:
    """Let the doctor try the parts of the app that need the ledger. Call this when Django starts."""
    ledger.walks = {Part.COUNTS: _counts, Part.BILLS: _bills, Part.RESTORES: _restores}
    ledger.failures = (NotFencedError, Unreadable)
    ledger.of_fence = _of_fence
    ledger.another_fence = another_fence
    ledger.other_fences = _other_values


def _counts(scratch: Scratch) -> None:
    """Count three requests in an open batch."""
    usage = Usage(_ACCOUNT, KEY, (Meter("requests"),))
    limit = FixedWindow(100, HOUR)
    call = Call(program((Term(limit, "counts", 0, 0),)), (KEY,), (1,), _ACCOUNT, usage, version=None)
    for _ in range(3):
        if not decide(scratch, call).allowed:
            raise WrongError("a request was refused that must be counted")


def _bills(scratch: Scratch) -> None:
    """Seal the batch of `_counts`, read it, check that the server can keep it, and delete it."""
    meta = scratch.keyspace.meta(0)
    sealing = (secrets.token_hex(12), "", str(time.time_ns() // 1000))
    run_script(scratch, "memory/full", "run", "batch", "seal", key=meta, arguments=sealing)
    run, _up, _now, _incarnation, _seq, _at, count, names, *_rest = run_script(
        scratch, "run", "pending", key=meta, arguments=("64",)
    )
    if count != 1:
        raise WrongError(f"{count} sealed batches wait, and not 1")
    name = names[0].decode()
    batch = scratch.key(scratch.keyspace.batch(0, name).removeprefix(scratch.keyspace.home))
    read = packet(0, read_fields(scratch.client, batch))
    if not read.lines:
        raise WrongError("the batch of counted requests has no lines")
    check_server(scratch.server, run.decode())
    if run_script(scratch, "drop", key=meta, arguments=(name,)) != 1:
        raise WrongError("a batch could not be removed")


def _restores(scratch: Scratch) -> None:
    """Let a limit without a state be lost, raise it to 7 permits, and charge one more."""
    term = Term(CalendarWindow(100, "month"), "restores", 0, 0, lasting=Lasting.ALWAYS)
    call = Call(program((term,)), (KEY,), (1,), version=None)
    try:
        decide(scratch, call)
    except Lost:
        decide(scratch, call._replace(op=Op.RESTORE, costs=(7,)))
    else:
        raise WrongError("a limit without a state was decided, and not restored")
    if (decision := decide(scratch, call)).remaining != 92:
        raise WrongError(f"{decision.remaining} of 100 permits were left after 7 were restored and 1 was taken")


def _of_fence(error: Exception, scratch: Scratch, who: Who, hidden: Sequence[str]) -> ServerFinding | None:
    """Return the finding for a fence that does not hold: nothing is written to the ledger. None for another error.

    `hidden` are the rights for commands that this fence would have sent later.
    """
    if not isinstance(error, NotFencedError):
        return None
    command = next((used.name for used in USED if used.fence == conf.FENCE), "")
    found = refused(error.__cause__, command) if error.__cause__ is not None else None
    acl = " ".join(dict.fromkeys((*([found.acl] if found is not None and found.acl else []), *filter(None, hidden))))
    others = _other_values(scratch)
    return ServerFinding(
        "fence",
        frozenset({Part.BILLS}),
        f"No usage will be written to the ledger: {error.reason}.",
        f"{who.right(acl)}, or another fence. {others}" if acl else others,
        acl,
    )


def _other_values(scratch: Scratch) -> str:
    """Return a sentence that says which other values of RATELIMITS["FENCE"] would work, and why the rest would not."""
    try:
        tried = other_fences(scratch.server, read_run(scratch.client, scratch.key("fence")))
    except (RedisError, Unavailable, OSError):
        return f"{another_fence()}."
    working = [f'"{name}"' for name, error in tried.items() if error is None]
    failing = [f'"{name}" ({error.reason})' for name, error in tried.items() if error is not None]
    names = f"{', '.join(working[:-1])} and {working[-1]}" if len(working) > 1 else "".join(working)
    return (
        f"RATELIMITS['FENCE'] is \"{conf.FENCE}\". If nobody can change this server, it accepts {names or 'no other'}:"
        " docs/billing/pipeline.md says what the provider must promise for it."
        + (f" It does not accept {', '.join(failing)}." if failing else "")
    )
