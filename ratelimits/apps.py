from __future__ import annotations

import sys

from django.apps import AppConfig
from django.db.models.signals import post_migrate
from django.utils.translation import gettext_lazy as _

from ratelimits import background
from ratelimits.background import stop_signals


class RatelimitsConfig(AppConfig):
    name = "ratelimits"
    verbose_name = _("Rate limits and usage")
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from ratelimits.checks import installation, rows, settings, usage  # noqa: F401  (the system checks)
        from ratelimits.models.raw import adoption, fixtures  # noqa: F401  (connects its signal handlers)
        from ratelimits.quota import process_totals
        from ratelimits.rules import groups
        from ratelimits.usage import process_totals as totals

        process_totals.write_with(totals.write)
        groups.watch()
        post_migrate.connect(adoption.adopt_after_migrate, sender=self, dispatch_uid="ratelimits.adoption")
        # Set the signal handler here, because `ready` runs in the main thread. Requests may run only in other threads.
        stop_signals.watch(background.end)
        if "celery" in sys.modules:
            from celery.signals import worker_process_shutdown, worker_shutdown

            # The child processes of a worker end without running the functions of `atexit`.
            for end_signal in (worker_process_shutdown, worker_shutdown):
                end_signal.connect(_end, weak=False, dispatch_uid="ratelimits")


def _end(**kwargs: object) -> None:
    background.end()
