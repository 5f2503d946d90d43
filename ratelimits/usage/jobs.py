"""The jobs that a management command and a Celery task of one name both do, and the moments at which they ran.

`ratelimits_drain` and `ratelimits.drain` call `drain`, and so on. A command and a task only differ in what they say: a
command prints the result, and a task raises the errors that a command prints. The jobs of bills are in `billing`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from django.db import DatabaseError, transaction

from ratelimits import moments, simulate
from ratelimits.conf import conf
from ratelimits.engine import Unavailable
from ratelimits.engine.server import current_server
from ratelimits.models.periods import plan_changes
from ratelimits.progress import Progress
from ratelimits.usage import recording
from ratelimits.usage.ledger import drain as draining
from ratelimits.usage.ledger import process_totals, span_totals
from ratelimits.usage.ledger import seal as sealing
from ratelimits.usage.ledger import tally as tallying
from ratelimits.usage.ledger.bills import bills
from ratelimits.usage.ledger.retention import compact as compacting
from ratelimits.usage.models.task_runs import TaskRun

# Projects can configure this name, which is older than the place of `note_run` in this module.
logger = logging.getLogger("ratelimits.usage.task_runs")

Task = TaskRun.Task
#: Maximum length of an error's text in the database.
_MAX_ERROR = 1000


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
        compacting.mark_ends(conf.DATABASE, bills.chains(conf.DATABASE))
    joined = list(compacting.compact(progress))
    process_totals.fold(int(time.time()))
    span_totals.expire(conf.DATABASE, int(time.time()))
    try:
        return CompactOutcome(joined, simulate.clean(current_server().wire), "")
    except Unavailable as error:
        return CompactOutcome(joined, 0, str(error))


@contextmanager
def note_run(task: TaskRun.Task) -> Iterator[None]:
    """Note at the end of the block that the task succeeded. If the block raises an error, note and raise the error."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}".replace("\0", "\ufffd")
        _write(TaskRun(task=task, failed_at=moments.now(), error=_cut(text)), ["failed_at", "error"])
        raise
    _write(TaskRun(task=task, succeeded_at=moments.now()), ["succeeded_at"])


def _cut(text: str) -> str:
    """Return a text that the database can hold: a longer one ends after a word, with "…"."""
    if len(text) <= _MAX_ERROR:
        return text
    whole, _space, _part = text[: _MAX_ERROR - 2].rpartition(" ")
    return f"{whole or text[: _MAX_ERROR - 2]} …"


def _write(row: TaskRun, fields: list[str]) -> None:
    """Write these fields. If the database does not answer, only log this: perhaps the task needs no database."""
    using = conf.DATABASE
    try:
        with transaction.atomic(using=using):
            TaskRun.objects.using(using).bulk_create(
                [row], update_conflicts=True, unique_fields=["task"], update_fields=fields
            )
    except DatabaseError as error:
        logger.warning("The run of the task %s could not be noted in the database: %s", row.task, error)
