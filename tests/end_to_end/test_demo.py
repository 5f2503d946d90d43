from __future__ import annotations

import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode, urljoin, urlsplit
from urllib.request import HTTPCookieProcessor, OpenerDirector, Request, build_opener

import psutil
import pytest

from ratelimits.embedded import die_with_parent
from tests.end_to_end.conftest import ROOT
from tests.support.eventually import until

DEMO = [sys.executable, "manage.py", "demo"]
ONCE = [*DEMO, "--once", "--requests", "300"]


def environment_of(directory: Path) -> dict[str, str]:
    """Return the environment of a person who just cloned the repository: it names no server."""
    own = {"REDIS_URL", "DATABASE_URL", "DJANGO_SETTINGS_MODULE"}
    rest = {name: value for name, value in os.environ.items() if name not in own}
    return {**rest, "DEMO_DATA_DIR": str(directory)}


@pytest.fixture
def demo_environment(tmp_path: Path) -> dict[str, str]:
    return environment_of(tmp_path / "demo")


def left_behind(environment: dict[str, str]) -> list[str]:
    """Return the processes of the demo with this data directory that still run."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("DEMO_DATA_DIR") == environment["DEMO_DATA_DIR"]:
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def run_once(environment: dict[str, str]) -> tuple[int, str]:
    """Run the demo to its end; its exit status, and all that it printed."""
    done = subprocess.run(ONCE, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert left_behind(environment) == []
    return done.returncode, done.stdout


def _as_from_a_terminal() -> None:
    """Make this process receive Ctrl-C.

    A shell's background job ignores it, and so would all processes that it starts.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()


@dataclass(frozen=True)
class Demo:
    """A running demo, its environment, and all that it has printed and `read_until` has read."""

    process: subprocess.Popen[str]
    environment: dict[str, str]
    printed: list[str] = field(default_factory=list)

    def read_until(self, phrase: str) -> str:
        """Read what the demo prints, until a line contains this phrase. Return this line."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append(line)
            if phrase in line:
                return line
        raise AssertionError(f"The demo ended before it printed {phrase!r}:\n{''.join(self.printed)}")

    def rest(self) -> str:
        """Read what the demo prints until it ends."""
        assert self.process.stdout is not None
        return self.process.stdout.read()


@pytest.fixture
def start(demo_environment: dict[str, str]) -> Iterator[Callable[[int], Demo]]:
    """Return a function that starts the demo, with this number of requests, in its own process group.

    A terminal would start it like this too.
    """
    started: list[Demo] = []

    def start(requests: int) -> Demo:
        process = subprocess.Popen(
            [*DEMO, "--requests", str(requests)],
            cwd=ROOT,
            env=demo_environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            preexec_fn=_as_from_a_terminal,
        )
        started.append(Demo(process, demo_environment))
        return started[-1]

    yield start
    for demo in started:
        with demo.process:  # closes the pipe too
            if demo.process.poll() is None:
                os.killpg(demo.process.pid, signal.SIGKILL)


def ctrl_c(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)


def terminate(process: subprocess.Popen[str]) -> None:
    process.terminate()


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()


def end(demo: Demo, by: Callable[[subprocess.Popen[str]], None]) -> None:
    """End the demo, and check that it leaves no process."""
    assert len(left_behind(demo.environment)) > 4
    by(demo.process)
    demo.process.wait(60)
    deadline = time.monotonic() + 30
    while left_behind(demo.environment) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_behind(demo.environment) == []


def worker_of(demo: Demo) -> psutil.Process:
    """Return the process of the demo's worker that started its other processes."""

    def found() -> psutil.Process | None:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                of_demo = process.environ().get("DEMO_DATA_DIR") == demo.environment["DEMO_DATA_DIR"]
                if of_demo and "celery" in process.cmdline() and os.getsid(process.pid) == process.pid:
                    return process
        return None

    process: psutil.Process = until(found, "a worker runs")
    return process


def test_the_demo_keeps_running_with_no_difference_and_fails_when_the_ledger_lost_a_line(
    start: Callable[[int], Demo], demo_environment: dict[str, str]
) -> None:
    demo = start(300)
    demo.read_until("Press Ctrl-C")
    printed = "".join(demo.printed)
    assert "Difference over all keys: 0" in printed
    assert "Usage is complete until 20" in printed
    # A finished month of a customer has a final report with amounts, and there is a daily rule.
    folder = Path(demo_environment["DEMO_DATA_DIR"])
    with closing(sqlite3.connect(folder / "db.sqlite3")) as database:
        assert database.execute("SELECT count(*) FROM ratelimits_rule WHERE calendar_unit = 'day'").fetchone() == (1,)
        assert database.execute("SELECT count(*), min(account) FROM ratelimits_billing_report").fetchone() == (
            1,
            "initech",
        )
        assert database.execute("SELECT sum(overage_quantity) > 0 FROM ratelimits_billing_reportline").fetchone() == (
            1,
        )
        assert database.execute("SELECT count(*) FROM ratelimits_billing_planprice").fetchone() == (1,)
    # Its worker dies, as Celery's does if its broker is killed. The demo goes on, with another worker.
    dead = worker_of(demo)
    os.killpg(dead.pid, signal.SIGKILL)
    demo.read_until("started again")
    until(lambda: worker_of(demo).pid != dead.pid, "another worker runs")
    assert demo.process.poll() is None
    end(demo, ctrl_c)

    with closing(sqlite3.connect(Path(demo_environment["DEMO_DATA_DIR"]) / "db.sqlite3")) as database:
        ((last,),) = database.execute("SELECT max(id) FROM ratelimits_usage_line")
        database.execute(
            "CREATE TRIGGER lose AFTER INSERT ON ratelimits_usage_line"
            f" WHEN (SELECT count(*) FROM ratelimits_usage_line WHERE id > {last}) = 1"
            " BEGIN DELETE FROM ratelimits_usage_line WHERE id = NEW.id; END"
        )
    status, printed = run_once(demo_environment)
    assert status == 1, printed
    assert "Difference over all keys: " in printed
    assert "Difference over all keys: 0" not in printed


def test_the_demo_ends_by_itself_with_status_0_if_nothing_is_lost(demo_environment: dict[str, str]) -> None:
    status, printed = run_once(demo_environment)
    assert status == 0, printed
    assert "Difference over all keys: 0" in printed


@pytest.mark.long
def test_a_terminated_demo_leaves_no_process(start: Callable[[int], Demo]) -> None:
    demo = start(20)
    demo.read_until("Press Ctrl-C")
    end(demo, terminate)


@contextmanager
def no_tables(directory: Path) -> Iterator[sqlite3.Connection]:
    """Within the block, let the demo with this data directory make no table: hold the lock of its database."""
    directory.mkdir()
    with closing(sqlite3.connect(directory / "db.sqlite3", isolation_level=None)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("BEGIN IMMEDIATE")
        yield database


def page(browser: OpenerDirector, url: str, **form: str) -> str:
    """Open a page, or send a form. Return the page to which this leads, and fail if its status is not 200."""
    data = urlencode(form).encode() if form else None
    with browser.open(Request(url, data, {"Referer": url}), timeout=60) as answer:
        assert answer.status == 200
        text: str = answer.read().decode()
        return text


def hidden(name: str, text: str) -> str:
    """Return the value of a hidden field of a page."""
    found = re.search(rf'name="{name}" value="(.+?)"', text)
    assert found is not None, text
    return found[1]


def test_the_login_comes_first_and_the_admin_works_while_the_clients_run_and_a_kill_leaves_no_process(
    start: Callable[[int], Demo], demo_environment: dict[str, str]
) -> None:
    with no_tables(Path(demo_environment["DEMO_DATA_DIR"])) as database:
        demo = start(10_000_000)  # more than it can send during this test
        admin = demo.read_until("Admin:").split()[1]
        password = demo.read_until("Login:").split()[-1]
        assert "sends 10,000,000 requests from 8 clients" in demo.read_until("The demo makes its tables")
        assert database.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
        # A browser that is faster than the demo waits, and then gets its page.
        early = HTTPConnection(urlsplit(admin).netloc, timeout=120)
        early.request("GET", "/admin/login/", headers={"Connection": "close"})

    for step in ("Making the tables", "Starting a web server", "Sending requests"):
        demo.read_until(step)
    with closing(early), early.getresponse() as answer:
        assert answer.status == 200

    browser = build_opener(HTTPCookieProcessor())
    token = hidden("csrfmiddlewaretoken", page(browser, f"{admin}login/?next=/admin/"))
    form = {"csrfmiddlewaretoken": token, "username": "admin", "password": password, "next": "/admin/"}
    index = page(browser, f"{admin}login/", **form)
    assert "Log out" in index
    for path in re.findall(r'(?:href|src)="(/static/[^"]+)"', index):
        page(browser, urljoin(admin, path))
    assert "everyone" in page(browser, f"{admin}ratelimits/rule/")
    assert "Log out" in page(browser, f"{admin}ratelimits/status/")

    end(demo, kill)
    # It was still sending.
    assert "Waiting until the worker has written the usage" not in demo.rest()
