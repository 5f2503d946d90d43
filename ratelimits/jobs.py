"""The jobs that a management command and a Celery task of one name both do.

`ratelimits_drain` and `ratelimits.drain` call `drain`, and so on. A command and a task only differ in what they say: a
command prints the result, and a task raises the errors that a command prints.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass

from ratelimits import recording, simulate
from ratelimits.conf import conf
from ratelimits.engine import Unavailable
from ratelimits.engine.server import current_server
from ratelimits.models import Report
from ratelimits.models.periods import plan_changes
from ratelimits.moments.databases import now_of
from ratelimits.progress import Progress
from ratelimits.push import deliveries as planning
from ratelimits.push import deliveries as sending
from ratelimits.push.receivers import Receiver
from ratelimits.reports.closing import close as closing
from ratelimits.usage import drain as draining
from ratelimits.usage import process_totals, span_totals
from ratelimits.usage import seal as sealing
from ratelimits.usage import tally as tallying
from ratelimits.usage.retention import compact as compacting
from ratelimits.usage.task_runs import Task, note_run


def seal() -> list[sealing.SealResult]:
    """Seal the open batches of all shards. Raise the errors of `usage.seal.seal`."""
    with note_run(Task.SEAL):
        return sealing.seal()


def drain(progress: Progress | None = None, *, wait: bool = False) -> draining.DrainResult:
    """Write all sealed batches to the ledger, and add them to the totals. Raise the errors of `usage.drain.drain`.

    Also change the plans of accounts whose next plan is due, because drains run every few seconds.
    If `wait` is true, wait for a shard that another process adds to the totals. Otherwise leave it to this process.
    """
    with note_run(Task.DRAIN):
        try:
            return draining.drain(progress=progress)
        finally:
            # Also after an error: perhaps only one shard had the error, and the other shards were drained.
            tallying.tally(progress, wait=wait)
            plan_changes.apply_due(conf.DATABASE)


def finalise(
    account: str | None = None, progress: Progress | None = None, *, wait: bool = False
) -> Iterator[closing.ClosingResult]:
    """Add the newest batches to the totals, then close the billing periods whose usage is complete.

    Also correct the reports of closed periods by new versions. `account` and `progress` are those of `finalise_each`,
    and `wait` is that of `drain`.
    """
    # The status page shows when all accounts were finalised. So a run for one account is not recorded.
    with note_run(Task.FINALISE) if account is None else nullcontext():
        tallying.tally(wait=wait)
        plan_changes.apply_due(conf.DATABASE)
        yield from closing.finalise_each(account=account, progress=progress)


@dataclass(frozen=True, slots=True)
class CompactOutcome:
    """The joined batches, how many simulations were cleaned, and why none could be cleaned ("" if they could)."""

    joined: list[compacting.CompactResult]
    simulations: int
    error: str


def compact(progress: Progress | None = None, *, mark: bool = False) -> CompactOutcome:
    """Join the ledger's batches of past hours. Add up old totals of single processes.

    Also delete old totals of short spans of time, old recorded requests, and what killed simulations left in Redis.
    With `mark`, first set a mark in the ledger where each report ends.
    """
    # Recorded requests can be personal data. So delete them first: they must be deleted even if the work below fails.
    recording.expire(time.time())
    if mark:
        reports = Report.objects.using(conf.DATABASE).order_by().values_list("chain", flat=True)
        closing.mark_ends(conf.DATABASE, reports.iterator())
    joined = list(compacting.compact(progress))
    process_totals.fold(int(time.time()))
    span_totals.expire(conf.DATABASE, int(time.time()))
    try:
        return CompactOutcome(joined, simulate.clean(current_server().wire), "")
    except Unavailable as error:
        return CompactOutcome(joined, 0, str(error))


def push(
    receiver: Receiver, progress: Progress | None = None, *, at_once: bool = False, max_seconds: float | None = None
) -> None:
    """Send a billing system the lines that it does not have yet. With `at_once`, end its pause first."""
    planning.plan(receiver, progress=progress)
    if at_once:
        sending.resume(receiver, now_of(conf.DATABASE))
    sending.send(receiver, max_seconds=max_seconds, progress=progress)
