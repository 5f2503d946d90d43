"""Tell the app that this process runs tests. The app never finds this out by itself.

A sign that production can give too would switch the app to tests there. For example, Django's tests use the mail
backend `locmem`, but so do some projects.
"""

from __future__ import annotations

import os
from functools import cache

from django.test import runner

from ratelimits import background
from ratelimits.conf import embedded
from ratelimits.engine import server
from ratelimits.testing.transactions import django_tests


@cache
def prepare_tests() -> None:
    """Let the app work in tests until this process ends. Further calls do nothing.

    From now on, the app finds the rules of a test's open transaction, and gives each test and each parallel worker its
    own Redis keys. If the settings name no server, this process starts one of its own. No thread writes to the
    database.
    """
    embedded.use_own()
    background.write_no_rows()
    server.separate_by(_worker)
    os.register_at_fork(after_in_child=_forked)
    django_tests.begin()


def _worker() -> str:
    """Return the suffix for the namespace of a parallel worker, of pytest-xdist or of Django's runner; else ""."""
    worker = os.environ.get("PYTEST_XDIST_WORKER") or str(getattr(runner, "_worker_id", None) or "")
    return f".{worker}" if worker else ""


def _forked() -> None:
    server.separate_by(_worker)  # Forget the server: the child can be a worker, which has another namespace.
