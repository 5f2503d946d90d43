"""Test processes that have no thread for the work beside the requests: they answer all the same."""

from __future__ import annotations

import os
import sys

import pytest
from django.db import connection

from tests.support import forked
from tests.support.rows import rule
from tests.support.servers import TestServers

_LATE = """
import sys, threading
import django
django.setup()
from ratelimits import rules
from ratelimits.identity import Identity
from ratelimits.quota import checking

WHO = Identity("user:1", None, None, "ip:203.0.113.9")

def late():
    threading.main_thread().join()
    rules._loader._refresh_at = 0  # the rules are to be read again
    print([checking.check(WHO).allowed for _ in range(3)])

if sys.argv[1] == "read before":
    assert checking.check(WHO).allowed
threading.Thread(target=late).start()
"""
_CROWDED = """
import threading
import django
django.setup()
from ratelimits.identity import Identity
from ratelimits.quota import checking

WHO = Identity("user:1", None, None, "ip:203.0.113.9")
checking.rules.current().with_rows_of(WHO)
threading.stack_size(1 << 46)  # as if there were too many: no thread can be started any more
print([checking.check(WHO).allowed for _ in range(3)])
"""


def run(servers: TestServers, script: str, *arguments: str) -> str:
    """Run a script on the test's own database and return what it prints."""
    database = servers.url_of_database(str(connection.settings_dict["NAME"]))
    process = forked.run(
        [sys.executable, "-c", script, *arguments],
        env={**os.environ, "DATABASE_URL": database},
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert process.returncode == 0, process.stderr
    printed: str = process.stdout.strip()
    return printed


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize(
    ("rules", "answers"), [("read before", "[True, False, False]"), ("never read", "[True, True, True]")]
)
def test_threads_that_outlive_the_main_one_are_answered(servers: TestServers, rules: str, answers: str) -> None:
    """Without rules the setting FAILURE_POLICY answers, here: allow."""
    rule("burst", capacity=2, rate="0.000001")
    assert run(servers, _LATE, rules) == answers


@pytest.mark.django_db(transaction=True)
def test_a_process_that_can_start_no_thread_is_answered(servers: TestServers) -> None:
    rule("burst", capacity=2, rate="0.000001")
    assert run(servers, _CROWDED) == "[True, True, False]"
