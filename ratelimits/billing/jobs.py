"""The jobs of bills: to finalise billing periods, and to send report lines to billing systems."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

from ratelimits.billing.push import deliveries as planning
from ratelimits.billing.push import deliveries as sending
from ratelimits.billing.push.receivers import Receiver
from ratelimits.billing.reports.closing import close as closing
from ratelimits.conf import conf
from ratelimits.models.periods import plan_changes
from ratelimits.moments import now_of
from ratelimits.progress import Progress
from ratelimits.usage.jobs import Task, note_run
from ratelimits.usage.ledger import tally as tallying


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


def push(
    receiver: Receiver, progress: Progress | None = None, *, at_once: bool = False, max_seconds: float | None = None
) -> None:
    """Send a billing system the lines that it does not have yet. With `at_once`, end its pause first."""
    planning.plan(receiver, progress=progress)
    if at_once:
        sending.resume(receiver, now_of(conf.DATABASE))
    sending.send(receiver, max_seconds=max_seconds, progress=progress)
