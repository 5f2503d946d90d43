"""The table with the first run, the last success and the last failure of each task."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from ratelimits import moments
from ratelimits.moments.columns import UTCDateTimeField


class TaskRun(models.Model):
    """The first run, the last success and the last failure of one task, in any process."""

    class Task(models.TextChoices):
        """The tasks that bring usage to the ledger and to reports."""

        SEAL = "seal", _("seal")
        DRAIN = "drain", _("drain")
        FINALISE = "finalise", _("finalise")

    task = models.CharField(_("task"), max_length=20, primary_key=True, choices=Task.choices)
    first_run_at = UTCDateTimeField(_("first run"), default=moments.now)
    succeeded_at = UTCDateTimeField(_("last success"), null=True, blank=True)
    failed_at = UTCDateTimeField(_("last failure"), null=True, blank=True)
    error = models.CharField(_("last error"), max_length=1000, blank=True)

    class Meta:
        verbose_name = _("run of a task")
        verbose_name_plural = _("runs of tasks")
        default_permissions = ()

    def __str__(self) -> str:
        return str(self.get_task_display())
