from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connection

from project.demo import processes
from project.models import ApiKey
from ratelimits.conf import DEFAULTS
from ratelimits.models import Account
from tests.support.forked import Forked
from tests.support.servers import TestServers
from tests.support.siblings import Sibling, siblings

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def environment(servers: TestServers, transactional_db: None, settings: Any) -> dict[str, str]:
    """Return the environment for another process to run the demo project on this test's server and database.

    This process then has as many shards as the demo project.
    """
    settings.RATELIMITS = {**settings.RATELIMITS, "SHARDS": DEFAULTS["SHARDS"]}
    name = connection.settings_dict["NAME"]
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "project.settings",
        "DATABASE_URL": servers.url_of_database(name),
        "RATELIMITS_NAMESPACE": "test",
        "RATELIMITS_TIMEOUT": "10",
        "PYTHONPATH": str(ROOT),
    }


@pytest.fixture
def askers(environment: dict[str, str]) -> Iterator[Callable[[int], list[Sibling]]]:
    """Return a function that starts this number of other processes (tests.support.end_to_end.asker)."""
    with ExitStack() as stack:
        module = "tests.support.end_to_end.asker"
        yield lambda count: stack.enter_context(siblings(module, count, environment=environment))


@pytest.fixture
def issue_key(transactional_db: None) -> Callable[[str], tuple[ApiKey, str]]:
    """Make a new API key of the account with this identifier; return it with its secret."""

    def issue(account: str) -> tuple[ApiKey, str]:
        Account.objects.get_or_create(identifier=account)
        user, _ = get_user_model().objects.get_or_create(username=account)
        return ApiKey.objects.issue(name=f"{account}'s", user=user, account=account)

    return issue


@pytest.fixture
def web_server(environment: dict[str, str], tmp_path: Path) -> Iterator[int]:
    """Start gunicorn with two workers; return its port."""
    log = tmp_path / "gunicorn.log"
    with (
        processes.listening_socket(0) as listener,
        processes.running(
            processes.gunicorn_arguments(listener), log, environment, (listener.fileno(),), popen=Forked
        ) as process,
    ):
        port: int = listener.getsockname()[1]
        processes.wait_until_up(f"http://127.0.0.1:{port}/", process, log)
        yield port


@pytest.fixture
def worker(environment: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a Celery worker with beat."""
    arguments = processes.celery_arguments(tmp_path / "schedule")
    with processes.running(arguments, tmp_path / "celery.log", environment, popen=Forked) as process:
        yield process
