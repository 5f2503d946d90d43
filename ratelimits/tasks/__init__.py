"""Celery tasks: each task only calls the function that does the work. It does no harm if a task runs twice.

A task that cannot do its work fails with the error, so that whoever watches failed tasks sees it. No task is retried:
the beat schedule starts the next run.

A task and a management command of one name, such as `ratelimits.drain` and `ratelimits_drain`, do the same job (see
the room `jobs`).

Add the tasks to the beat schedule of your Celery app:

    @app.on_after_finalize.connect
    def schedule(sender, **kwargs):
        from ratelimits.tasks import beat_schedule
        sender.conf.beat_schedule |= beat_schedule()
"""

from __future__ import annotations

from ratelimits.tasks.billing import finalise, push, push_to
from ratelimits.tasks.usage import alerts, beat_schedule, compact, deliver_alert, drain, seal

__all__ = ["alerts", "beat_schedule", "compact", "deliver_alert", "drain", "finalise", "push", "push_to", "seal"]
