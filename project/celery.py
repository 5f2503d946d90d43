from __future__ import annotations

import os
from typing import Any

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "project.settings")

app = Celery("project")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@app.on_after_finalize.connect
def add_schedule(sender: Celery, **kwargs: Any) -> None:
    from ratelimits.usage.tasks import beat_schedule

    sender.conf.beat_schedule |= beat_schedule()
