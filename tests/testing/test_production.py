"""Test that production is never taken for a test run, and that `manage.py test` says what it needs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.fresh import Project
from tests.support.servers import TestServers

#: Ways to look for a test run that production could show too.
_SIGNS = re.compile(
    r"outbox|PYTEST|sys\.argv.*\btest\b|modules.*\b(pytest|unittest|django\.test)\b|_from_testcase|_worker_id"
)

_NO_REDIS = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}


@pytest.fixture
def project(tmp_path: Path, servers: TestServers) -> Project:
    made = Project(tmp_path, servers)
    made.create_database("default")
    made.settings["EMAIL_BACKEND"] = "django.core.mail.backends.locmem.EmailBackend"
    return made


_REQUEST = """
import threading
from django.core import mail
from django.test import Client
from ratelimits import background
from ratelimits.models import Rule

mail.get_connection()  # as any project does that sends a mail
assert mail.outbox == []
Rule.objects.create(name="burst", algorithm="fixed_window", capacity=2, period=3600, key_kind="ip")
print([Client().get("/hello/").status_code for _time in range(3)])
print(sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("ratelimits-")))
background.end()
"""


def test_mail_in_memory_is_no_test_run(project: Project) -> None:
    project.settings["RATELIMITS"]["RECORD_SAMPLE"] = 1
    project.settings["DEBUG"] = False
    project.manage("migrate")
    said = project.python(
        _REQUEST
        + "from ratelimits.usage.models import ProcessTotal, RecordedRequest\n"
        + "print(ProcessTotal.objects.exists(), RecordedRequest.objects.count())\n"
    )
    assert "[200, 200, 429]" in said
    assert "ratelimits-process-totals" in said
    assert "ratelimits-recorder" in said
    assert "True 3" in said


def test_with_mail_in_memory_all_processes_share_the_embedded_server(project: Project) -> None:
    project.settings.update(CACHES=_NO_REDIS, DEBUG=True)
    del project.settings["RATELIMITS"]["CACHE_ALIAS"]
    project.manage("migrate")
    said = project.python(
        _REQUEST + "from ratelimits.engine.transport.wire import configured\nprint(configured('default'))\n"
    )
    shared = json.loads((project.directory / ".ratelimits" / "server.json").read_text())
    assert shared["path"] in said


def test_no_room_but_the_testing_kit_asks_whether_a_test_runs() -> None:
    root = Path(__file__).resolve().parents[2] / "ratelimits"
    asking = [
        f"{path.relative_to(root)}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        # The checks only warn of a test run that nobody has announced.
        if path.relative_to(root).parts[0] not in ("checks", "pytest_plugin.py", "testing")
        for line in path.read_text().splitlines()
        if _SIGNS.search(line)
    ]
    assert asking == []


_TEST = """\
from django.test import TestCase


class Tests(TestCase):
    def test(self):
        pass
"""


def test_djangos_runner_alone_is_named_in_a_warning(project: Project) -> None:
    project.write("shop/tests.py", _TEST)
    project.settings["DATABASES"]["default"]["TEST"] = {"MIGRATE": False}
    said = project.manage("test", "--noinput")
    assert "ratelimits.W012" in said
    assert "TEST_RUNNER" in said
    assert "ratelimits.W012" not in project.manage("check")
    project.settings["TEST_RUNNER"] = "ratelimits.testing.runner.QuotaTestRunner"
    assert "ratelimits.W012" not in project.manage("test", "--noinput")


def test_without_the_runner_the_embedded_server_is_refused_with_the_setting_to_write(project: Project) -> None:
    project.write("shop/tests.py", _TEST)
    project.settings.update(CACHES=_NO_REDIS, DEBUG=True)
    project.settings["DATABASES"]["default"]["TEST"] = {"MIGRATE": False}
    del project.settings["RATELIMITS"]["CACHE_ALIAS"]
    said = project.manage("test", "--noinput", fails=True)
    assert "ratelimits.E003" in said
    assert "TEST_RUNNER" in said
