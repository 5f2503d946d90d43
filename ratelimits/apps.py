"""The app of rules and limits. `usage/apps.py` and `billing/apps.py` are the apps above it."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from django.apps import AppConfig
from django.core.exceptions import ImproperlyConfigured
from django.db.models.signals import post_migrate, pre_migrate
from django.utils.translation import gettext_lazy as _

from ratelimits import background
from ratelimits.conf import embedded
from ratelimits.embedded import ServerStartError, broker_url

logger = logging.getLogger(__name__)

#: Programs that send or run Celery tasks. `python -m gunicorn` runs the file gunicorn/__main__.py: then the name is the
#: name of the folder.
_PROGRAMS_WITH_BROKER = frozenset({"celery", "daphne", "granian", "gunicorn", "hypercorn", "uvicorn"})
#: Commands of `manage.py` that send tasks. A shell sends a task if a person calls the task there.
_COMMANDS_WITH_BROKER = frozenset({"runserver", "runserver_plus", "shell", "shell_plus"})


class RatelimitsConfig(AppConfig):
    name = "ratelimits"
    verbose_name = _("Rate limits")
    #: The pages of the admin's index, in the order in which people use them.
    pages = (
        *("Status", "Inspect", "Access", "KeyReset", "Rule", "Plan", "PlanMembership", "KeyOverride", "Account"),
        "Change",
    )
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from ratelimits import routers, telemetry
        from ratelimits.checks import (  # noqa: F401  (the system checks)
            credentials,
            entry_points,
            installation,
            paths,
            rows,
            server,
            settings,
        )
        from ratelimits.models.raw import adoption, fixtures  # noqa: F401  (connects its signal handlers)
        from ratelimits.rules import groups

        groups.watch()
        telemetry.start()
        pre_migrate.connect(routers.read_database, sender=self, dispatch_uid="ratelimits.routers")
        post_migrate.connect(adoption.adopt_after_migrate, sender=self, dispatch_uid="ratelimits.adoption")
        # Set the signal handler here, because `ready` runs in the main thread. Perhaps no request runs in this thread.
        background.watch_signals(background.end)
        if "celery" in sys.modules:
            from celery import current_app
            from celery.signals import worker_process_shutdown, worker_shutdown

            # The child processes of a worker end without running the functions of `atexit`.
            for end_signal in (worker_process_shutdown, worker_shutdown):
                end_signal.connect(_end, weak=False, dispatch_uid="ratelimits")
            _give_broker(current_app)


def _give_broker(celery: Any) -> None:
    """Use database 1 of the embedded server as Celery's broker, if Celery has no broker.

    Do this only in web servers, workers and shells.
    """
    # Other commands, such as `migrate`, send no tasks, so they do not need to start the server.
    if _COMMANDS_WITH_BROKER.isdisjoint(sys.argv) and _PROGRAMS_WITH_BROKER.isdisjoint(Path(sys.argv[0]).parts[-2:]):
        return
    with suppress(ImproperlyConfigured):  # `manage.py check` reports settings that are not valid.
        if embedded.is_needed() and embedded.is_allowed() and not celery.conf.broker_url:
            try:
                celery.conf.broker_url = broker_url(embedded.folder())
            except ServerStartError as error:
                # Celery itself would only say that its default broker, amqp://guest@localhost, does not answer.
                logger.warning("The settings name no broker for Celery (CELERY_BROKER_URL). %s", error)


def _end(**kwargs: object) -> None:
    """Let the background threads do their last work. Celery's signals call this function with keyword arguments."""
    background.end()
