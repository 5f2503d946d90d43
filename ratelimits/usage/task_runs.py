"""Note when a background task last succeeded and last failed. The status page shows these moments."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from django.db import DatabaseError, transaction

from ratelimits import moments
from ratelimits.conf import conf
from ratelimits.models.status.task_runs import TaskRun

Task = TaskRun.Task
#: Maximum length of an error's text in the database.
_MAX_ERROR = 1000

logger = logging.getLogger(__name__)


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
