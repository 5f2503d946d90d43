"""The Celery app of benchmarks.waiting.tasks: a limited task that stores its granted time and the time when it ran."""

from __future__ import annotations

import json
import os
import uuid
from typing import Any

import django
import redis
from celery import Celery
from celery.signals import after_task_publish, before_task_publish

django.setup()

from ratelimits.outbound.celery import HEADER, QuotaTask  # noqa: E402  (needs Django's apps)

URL = os.environ["BENCHMARK_REDIS_URL"]
# Redis keys of the results.
#: A list with an item for each run of a task.
RUNS = "runs"
#: The number of messages to the broker.
MESSAGES = "messages"
#: A hash with a field for each task's id: the identity of the newest message of the task.
NEWEST = "newest"
#: The set of the ids of the tasks that have run.
FINISHED = "finished"
results = redis.Redis.from_url(f"{URL}/4")

app = Celery("benchmark", broker=f"{URL}/3")
app.conf.task_ignore_result = True
app.conf.worker_hijack_root_logger = False
app.conf.broker_connection_retry_on_startup = True
app.conf.broker_transport_options = {"visibility_timeout": float(os.environ["BENCHMARK_VISIBILITY"])}


@before_task_publish.connect
def give_identity(headers: dict[str, Any], **kwargs: object) -> None:
    """Give a message that this process will send an identity. A task that is sent again has several messages."""
    headers["message"] = uuid.uuid4().hex
    results.hset(NEWEST, headers["id"], headers["message"])


@after_task_publish.connect
def count(**kwargs: object) -> None:
    """Count a message that this process has sent to the broker."""
    results.incr(MESSAGES)


@app.task(base=QuotaTask, bind=True, quota="crm-sync", max_retries=0)
def sync(self: Any, number: int) -> None:
    """Store the moments at which the task was granted and at which it ran, both by the server's clock."""
    seconds, micros = results.time()
    # If the task waited in this worker, its permit is in the request. If the message was sent again, the permit is in
    # a header.
    permit = self.request.get(HEADER) or self.request.headers[HEADER]
    run = {
        "number": number,
        "granted": permit["granted"],
        "ran": seconds * 1_000_000 + micros,
        "retries": self.request.retries,
    }
    with results.pipeline() as pipeline:
        pipeline.rpush(RUNS, json.dumps(run))
        pipeline.sadd(FINISHED, self.request.id)
        pipeline.execute()
