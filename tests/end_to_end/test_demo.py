from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from ratelimits.embedded import die_with_parent
from tests.end_to_end.conftest import ROOT

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


def test_the_demo_ends_with_no_difference_and_fails_when_the_ledger_lost_a_line(
    demo_environment: dict[str, str],
) -> None:
    status, printed = run_once(demo_environment)
    assert status == 0, printed
    assert "Difference over all keys: 0" in printed
    assert "Usage is complete until 20" in printed

    with closing(sqlite3.connect(Path(demo_environment["DEMO_DATA_DIR"]) / "db.sqlite3")) as database:
        ((last,),) = database.execute("SELECT max(id) FROM ratelimits_line")
        database.execute(
            f"CREATE TRIGGER lose AFTER INSERT ON ratelimits_line WHEN (SELECT count(*) FROM ratelimits_line"
            f" WHERE id > {last}) = 1 BEGIN DELETE FROM ratelimits_line WHERE id = NEW.id; END"
        )
    status, printed = run_once(demo_environment)
    assert status == 1, printed
    assert "Difference over all keys: 0" not in printed


def _as_from_a_terminal() -> None:
    """Make this process receive Ctrl-C.

    A shell's background job ignores it, and so would all processes that it starts.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    die_with_parent()


@pytest.fixture(scope="module")
def demos_that_stay_up(tmp_path_factory: pytest.TempPathFactory, long_run: bool) -> Iterator[dict[str, Demo]]:
    """Start one demo for each way to end it; they start in parallel."""
    started = {name: start(tmp_path_factory.mktemp(name)) for name in ENDS if long_run or name != "terminate"}
    yield started
    for demo in started.values():
        if demo.process.poll() is None:
            os.killpg(demo.process.pid, signal.SIGKILL)
            demo.process.wait()


@dataclass(frozen=True)
class Demo:
    """A running demo, its output so far, and its environment."""

    process: subprocess.Popen[bytes]
    output: Path
    environment: dict[str, str]

    def wait_until_up(self) -> None:
        """Wait until the demo has printed its addresses."""
        deadline = time.monotonic() + 120
        while b"Press Ctrl-C" not in self.output.read_bytes():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.1)


def start(directory: Path) -> Demo:
    """Start the demo in its own process group, as a terminal would."""
    output, environment = directory / "output", environment_of(directory / "demo")
    with output.open("wb") as written:
        process = subprocess.Popen(
            [*DEMO, "--requests", "20"],
            cwd=ROOT,
            env=environment,
            stdout=written,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_as_from_a_terminal,
        )
    return Demo(process, output, environment)


def ctrl_c(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGINT)


def terminate(process: subprocess.Popen[bytes]) -> None:
    process.terminate()


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()


ENDS = {"ctrl_c": ctrl_c, "terminate": terminate, "kill": kill}


@pytest.mark.parametrize("end", ["ctrl_c", pytest.param("terminate", marks=pytest.mark.long), "kill"])
def test_however_the_demo_is_ended_it_leaves_no_process(end: str, demos_that_stay_up: dict[str, Demo]) -> None:
    demo = demos_that_stay_up[end]
    demo.wait_until_up()
    assert len(left_behind(demo.environment)) > 4
    ENDS[end](demo.process)
    demo.process.wait(60)
    deadline = time.monotonic() + 30
    while left_behind(demo.environment) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_behind(demo.environment) == []
