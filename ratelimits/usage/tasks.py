"""The tasks that count usage and send alerts."""

from __future__ import annotations

import logging
from typing import Any
from uuid import UUID

from celery import shared_task

from ratelimits.conf import conf
from ratelimits.rules import RulesUnavailable
from ratelimits.usage import jobs
from ratelimits.usage.alerts import deliver
from ratelimits.usage.alerts.evaluate import evaluate
from ratelimits.usage.ledger.bills import bills

# Projects can configure this name, which is older than this module.
logger = logging.getLogger("ratelimits.usage.tasks")

#: The task `ratelimits.seal` is dropped if it has waited for this number of seconds. Otherwise a worker that was down
#: would run hundreds of these tasks.
_SEAL_EXPIRES = 3600


@shared_task(name="ratelimits.seal", ignore_result=True, acks_late=True)
def seal() -> None:
    """Seal the open batches of all shards."""
    jobs.seal()


@shared_task(name="ratelimits.drain", ignore_result=True, acks_late=True)
def drain() -> None:
    """Write all sealed batches to the ledger, and add them to the totals by account and period."""
    jobs.drain()


@shared_task(name="ratelimits.alerts", ignore_result=True, acks_late=True)
def alerts() -> None:
    """Raise an alert for each threshold that an account has newly reached. Start a task for each due delivery."""
    try:
        evaluate()
    except RulesUnavailable as error:
        logger.warning("Alerts could not be raised; the next run of the task tries again: %s", error)
    for name in deliver.due():
        # If a delivery does not start before the next run of this task, that run finds it again.
        deliver_alert.apply_async((str(name),), expires=max(conf.ALERT_INTERVAL, 1))


@shared_task(name="ratelimits.deliver_alert", ignore_result=True, acks_late=True, soft_time_limit=deliver.MAX_ATTEMPT)
def deliver_alert(delivery: str) -> None:
    """Send one delivery of an alert, if it is due. A delivery that fails becomes due again after a growing pause."""
    deliver.deliver(UUID(delivery))


@shared_task(name="ratelimits.compact", ignore_result=True, acks_late=True)
def compact() -> None:
    """Join the ledger's batches of past hours. Add up old totals of single processes.

    Also delete old totals of short spans of time, old recorded requests, and what killed simulations left in Redis.
    """
    if error := jobs.compact().error:
        logger.warning("What killed simulations left in Redis is still there; the next run tries again: %s", error)


def beat_schedule() -> dict[str, dict[str, Any]]:
    """Return the periodic tasks for Celery's `beat_schedule`.

    A task is dropped if it has not started before the same task is due again. Only `ratelimits.seal` waits longer:
    after a long drain, the worker then seals as soon as it is free.
    """
    intervals = {
        "ratelimits.seal": conf.SEAL_INTERVAL,
        "ratelimits.drain": conf.DRAIN_INTERVAL,
        "ratelimits.compact": conf.COMPACT_INTERVAL,
        "ratelimits.alerts": conf.ALERT_INTERVAL,
        **bills.intervals(),
    }
    expires = {"ratelimits.seal": _SEAL_EXPIRES}
    return {
        name: {"task": name, "schedule": seconds, "options": {"expires": max(seconds, expires.get(name, 1))}}
        for name, seconds in intervals.items()
    }
