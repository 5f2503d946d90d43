"""The demo project's Celery app, with processes that crash by a plan.

Start it with `celery -A tests.support.usage.celery_app worker --beat`. The file in CRASH_PLAN has a line for each
crash, "child <point>" or "worker <point>". The first process that reaches the point of the first line removes this line
and kills itself, or the whole worker, with SIGKILL. For each task that is delivered again, the file ".again" gets a
line with the task's name.
"""

from __future__ import annotations

import fcntl
import os
import signal
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import task_prerun
from django.conf import settings

from project.celery import app
from ratelimits.usage.ledger import crash

# Two children can do this number of drains. More drains would wait in the queue and expire.
settings.RATELIMITS.update(SEAL_INTERVAL=0.3, DRAIN_INTERVAL=0.5, COMPACT_INTERVAL=0.5)
# Let the task of a killed child be delivered again.
app.conf.task_reject_on_worker_lost = True
app.conf.worker_prefetch_multiplier = 1
# Deliver the tasks of a killed worker again after this many seconds. A task that takes longer is done twice.
app.conf.broker_transport_options = {"visibility_timeout": 2}


@app.on_after_finalize.connect
def _compact_at_once(sender: object, **kwargs: object) -> None:
    from ratelimits.usage.ledger.retention import compact

    compact.SPAN = 300_000


@app.on_after_finalize.connect
def _keep_tasks(sender: Celery, **kwargs: object) -> None:
    # Celery looks for tasks of killed workers only every ten seconds. They must not expire before that.
    for name in ("ratelimits.drain", "ratelimits.compact"):
        sender.conf.beat_schedule[name]["options"]["expires"] = 60


_PLAN = Path(os.environ["CRASH_PLAN"])


@task_prerun.connect
def _note_redelivery(task: Any, **kwargs: object) -> None:
    if task.request.delivery_info.get("redelivered"):
        with _PLAN.with_suffix(".again").open("a") as noted:
            noted.write(f"{task.name}\n")


def _reached(point: str) -> None:
    with _PLAN.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lines = _PLAN.read_text().splitlines()
        if not lines or lines[0].split()[1] != point:
            return
        victim = lines[0].split()[0]
        rest = _PLAN.with_suffix(".new")
        rest.write_text("\n".join(lines[1:]))
        rest.replace(_PLAN)
    if victim == "worker":
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


crash.reached = _reached
