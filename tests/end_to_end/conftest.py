from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.db import connection

from project.demo import processes
from project.models import ApiKey
from ratelimits.models import Account
from tests.support.servers import TestServers

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def environment(servers: TestServers, transactional_db: None) -> dict[str, str]:
    """Return the environment for another process to run the demo project on this test's server and database."""
    name = connection.settings_dict["NAME"]
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "project.settings",
        "DATABASE_URL": servers.url_of_database(name),
        "RATELIMITS_NAMESPACE": "test",
        "PYTHONPATH": str(ROOT),
    }


@dataclass
class Asker:
    """Another process, which makes requests with a given key."""

    process: subprocess.Popen[str]

    def ask(self, secret: str, times: int = 1) -> None:
        assert self.process.stdin is not None
        print(json.dumps({"secret": secret, "times": times}), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        answer: dict[str, Any] = json.loads(self.process.stdout.readline())
        return answer


@pytest.fixture
def askers(environment: dict[str, str]) -> Iterator[Callable[[int], list[Asker]]]:
    """Return a function that starts this number of other processes."""
    with ExitStack() as stack:

        def start(count: int) -> list[Asker]:
            started = [
                Asker(
                    stack.enter_context(
                        subprocess.Popen(
                            [sys.executable, "-m", "tests.support.end_to_end.asker"],
                            stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE,
                            text=True,
                            env=environment,
                            cwd=ROOT,
                        )
                    )
                )
                for _ in range(count)
            ]
            for asker in started:
                assert asker.process.stdout is not None
                assert asker.process.stdout.readline() == "ready\n"
            return started

        yield start


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
            processes.gunicorn_arguments(listener), log, environment, pass_fds=(listener.fileno(),)
        ) as process,
    ):
        port: int = listener.getsockname()[1]
        processes.wait_until_up(f"http://127.0.0.1:{port}/", process, log)
        yield port


@pytest.fixture
def worker(environment: dict[str, str], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a Celery worker with beat."""
    arguments = processes.celery_arguments(tmp_path / "schedule")
    with processes.running(arguments, tmp_path / "celery.log", environment) as process:
        yield process
