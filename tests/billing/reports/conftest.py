from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from django.db import connection

from tests.support import forked
from tests.support.servers import TestServers


@pytest.fixture(autouse=True)
def _at_once(fsync_at_once: None) -> None:
    """Have the server fsync at once, so that no test waits for the fence."""


@pytest.fixture
def manage(servers: TestServers, transactional_db: None) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run a management command in its own process, on the test's database."""
    environment = {
        **os.environ,
        "DATABASE_URL": servers.url_of_database(str(connection.settings_dict["NAME"])),
        "DJANGO_SETTINGS_MODULE": "tests.settings",
    }

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "manage.py", *map(str, arguments)]
        return forked.run(command, env=environment, capture_output=True, text=True)

    return run
