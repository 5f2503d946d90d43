"""The tasks of bills."""

from __future__ import annotations

from celery import shared_task

from ratelimits.billing import jobs
from ratelimits.billing.push import receivers
from ratelimits.conf import conf


@shared_task(name="ratelimits.finalise", ignore_result=True, acks_late=True)
def finalise() -> None:
    """Close the billing periods whose usage is complete. Correct the reports of closed periods by new versions."""
    for _closed in jobs.finalise():
        pass  # Each step of the iterator finalises reports.


@shared_task(name="ratelimits.push", ignore_result=True, acks_late=True)
def push() -> None:
    """Start one task for each billing system in PUSH. The task sends the lines that this system does not have yet."""
    for name in conf.PUSH:
        push_to.apply_async((name,), expires=max(conf.PUSH_INTERVAL, 1))


@shared_task(name="ratelimits.push_to", ignore_result=True, acks_late=True)
def push_to(name: str) -> None:
    """Send a billing system the lines that it does not have yet, for at most PUSH_INTERVAL. The next run continues."""
    if name in conf.PUSH:  # The setting can change while a task waits.
        jobs.push(receivers.receiver(name), max_seconds=conf.PUSH_INTERVAL)
