"""Celery tasks: each only calls what does the work, and can be delivered twice or run beside itself.

Add them to your app's beat schedule (docs/billing.md):

    @app.on_after_finalize.connect
    def schedule(sender, **kwargs):
        from ratelimits.tasks import beat_schedule
        sender.conf.beat_schedule |= beat_schedule()
"""

from __future__ import annotations

import logging
import time
from typing import Any
from uuid import UUID

from celery import shared_task
from redis.exceptions import RedisError

from ratelimits.alerts import deliver
from ratelimits.alerts.evaluate import evaluate
from ratelimits.conf import conf
from ratelimits.push import plan as planning
from ratelimits.push import receivers
from ratelimits.push import send as sending
from ratelimits.reports.closing import close as closing
from ratelimits.rules import RulesUnavailable
from ratelimits.usage import drain as draining
from ratelimits.usage import process_totals
from ratelimits.usage import seal as sealing
from ratelimits.usage import tally as tallying
from ratelimits.usage.fence import NotFencedError
from ratelimits.usage.retention import compact as compacting

logger = logging.getLogger(__name__)

#: Sealing that was due so many seconds ago is dropped: what a worker meets that was away must not keep it for long.
_LATEST_SEAL = 3600


@shared_task(name="ratelimits.seal", ignore_result=True, acks_late=True)
def seal() -> None:
    """Seal the open batches of all shards."""
    try:
        sealing.seal()
    except RedisError as error:
        logger.warning("The usage could not be sealed: %s", error)


@shared_task(name="ratelimits.drain", ignore_result=True, acks_late=True)
def drain() -> None:
    """Bring all sealed batches into the ledger, and add them to the totals by account and period."""
    try:
        draining.drain()
        tallying.tally()
    except (NotFencedError, RedisError) as error:
        logger.warning("The usage could not be drained; the next drain goes on: %s", error)


@shared_task(name="ratelimits.finalise", ignore_result=True, acks_late=True)
def finalise() -> None:
    """Close the billing periods whose usage is complete, and correct closed ones."""
    for _closed in closing.finalise_each():
        pass


@shared_task(name="ratelimits.alerts", ignore_result=True, acks_late=True)
def alerts() -> None:
    """Raise the alerts that the ledger's totals are due, and have the deliveries made that wait."""
    try:
        evaluate()
    except RulesUnavailable as error:
        logger.warning("Alerts could not be raised; the next look goes on: %s", error)
    for name in deliver.due():
        # One that is not begun before the next look is found by that.
        deliver_alert.apply_async((str(name),), expires=max(conf.ALERT_INTERVAL, 1))


@shared_task(name="ratelimits.deliver_alert", ignore_result=True, acks_late=True, soft_time_limit=deliver.MAX_ATTEMPT)
def deliver_alert(delivery: str) -> None:
    """Make one delivery of an alert, if it is due; one that fails becomes due again, later each time."""
    deliver.deliver(UUID(delivery))


@shared_task(name="ratelimits.push", ignore_result=True, acks_late=True)
def push() -> None:
    """Have each billing system of PUSH sent what it lacks."""
    for name in conf.PUSH:
        push_to.apply_async((name,), expires=max(conf.PUSH_INTERVAL, 1))


@shared_task(name="ratelimits.push_to", ignore_result=True, acks_late=True)
def push_to(name: str) -> None:
    """Send a billing system what it lacks, for PUSH_INTERVAL at most: the next look goes on."""
    if name in conf.PUSH:  # a setting may change while a task waits
        receiver = receivers.receiver(name)
        planning.plan(receiver)
        sending.send(receiver, max_seconds=conf.PUSH_INTERVAL)


@shared_task(name="ratelimits.compact", ignore_result=True, acks_late=True)
def compact() -> None:
    """Join the batches of past hours in the ledger, and the totals of processes that have ended."""
    for _joined in compacting.compact():
        pass
    process_totals.fold(int(time.time()))


def beat_schedule() -> dict[str, dict[str, Any]]:
    """The periodic tasks, for Celery's `beat_schedule`; one that was not begun before the next is due is dropped.

    Not so sealing: where drains outlast their interval and fill the worker, one that waits is done when it can be.
    """
    every = {
        "ratelimits.seal": conf.SEAL_INTERVAL,
        "ratelimits.drain": conf.DRAIN_INTERVAL,
        "ratelimits.finalise": conf.FINALISE_INTERVAL,
        "ratelimits.compact": conf.COMPACT_INTERVAL,
        "ratelimits.alerts": conf.ALERT_INTERVAL,
    }
    if conf.PUSH:
        every["ratelimits.push"] = conf.PUSH_INTERVAL
    late = {"ratelimits.seal": _LATEST_SEAL}
    return {
        name: {"task": name, "schedule": seconds, "options": {"expires": max(seconds, late.get(name, 1))}}
        for name, seconds in every.items()
    }
