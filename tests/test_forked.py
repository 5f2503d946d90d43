"""Test that a fork of the nursery (tests/support/forked.py) is what a new interpreter would be."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ratelimits.embedded import die_with_parent
from tests.support import forked

#: What a process can see of how it was started, except its memory.
SEEN = """\
import gc, json, os, signal, sys, threading, warnings
print(json.dumps([
    __name__, str(globals().get("__file__")), sys.argv, sys.orig_argv, sys.path, os.getcwd(),
    sorted(set(os.environ.items()) - {("LC_CTYPE", "C.UTF-8")}),
    sys.warnoptions, warnings.filters[0][0], os.getsid(0) == os.getpid(), sorted(os.listdir("/proc/self/fd")),
    sys.stdin.read(), [sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors, sys.stdout.write_through],
    [str(signal.getsignal(number)) for number in signal.valid_signals()], sorted(signal.pthread_sigmask(0, [])),
    threading.active_count(), gc.isenabled(), "tests" in sys.modules,
]))
print("an error", file=sys.stderr)
raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["-m", "-c", "a script"])
def test_it_sees_the_same(how: str, tmp_path: Path) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    arguments = {"-m": ["-m", "seen"], "-c": ["-c", SEEN], "a script": ["seen.py"]}[how]
    kept = {name: text for name, text in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**kept, "PYTHONPATH": f"{tmp_path}:/nowhere", "PYTHONWARNINGS": "error", "OWN": "one"}
    (tmp_path / "input").write_text("typed")
    with socket.socket() as passed:

        def done(popen: type[subprocess.Popen[Any]]) -> tuple[Any, ...]:
            with (tmp_path / "input").open() as given:
                process = popen(
                    [sys.executable, "-W", "ignore", *arguments, "first", "second"],
                    cwd=tmp_path,
                    env=environment,
                    stdin=given,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    pass_fds=[passed.fileno()],
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
            return (*process.communicate(), process.returncode)

        forks = done(forked.Forked)
        assert forks == done(subprocess.Popen)
    assert forks[1:] == ("an error\n", 3)


def test_it_is_waited_for_and_killed() -> None:
    with forked.Forked([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
    assert process.poll() == process.returncode == -signal.SIGKILL


def test_what_it_does_at_its_end_is_done(tmp_path: Path) -> None:
    text = "import atexit, threading; threading.Timer(0.01, print, ['thread']).start(); atexit.register(print, 'end')"
    assert forked.run([sys.executable, "-c", text], capture_output=True, text=True).stdout == "thread\nend\n"
    failed = forked.run([sys.executable, "-c", "1 / 0"], capture_output=True, text=True)
    assert (failed.returncode, failed.stderr.splitlines()[-1]) == (1, "ZeroDivisionError: division by zero")
    with pytest.raises(subprocess.CalledProcessError):
        forked.run([sys.executable, "-c", "raise SystemExit(2)"], check=True)


def test_other_programs_are_not_forked() -> None:
    with pytest.raises(AssertionError):
        forked.run(["/bin/true"])
