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
from tests.support.forked_shell import forked_python

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


@pytest.mark.parametrize("how", ["-m", "-c", "a script"])
def test_it_imports_the_app_that_a_new_interpreter_would(how: str, tmp_path: Path) -> None:
    text = "import ratelimits.engine; print(ratelimits.engine.__file__)"
    (tmp_path / "shown.py").write_text(text)
    (tmp_path / "copy" / "ratelimits").mkdir(parents=True)
    for name in ("__init__", "engine"):
        (tmp_path / "copy" / "ratelimits" / f"{name}.py").write_text("")
    arguments = {"-m": ["-m", "shown"], "-c": ["-c", text], "a script": ["shown.py"]}[how]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for places in (f"{tmp_path / 'copy'}:{forked.ROOT}", f"{forked.ROOT}:{tmp_path / 'copy'}", ""):
        more: dict[str, Any] = {"cwd": tmp_path, "env": {**kept, "PYTHONPATH": places}, "capture_output": True}
        forks = forked.run([sys.executable, *arguments], text=True, **more)
        new = subprocess.run([sys.executable, *arguments], text=True, check=False, **more)
        assert (forks.returncode, forks.stdout) == (new.returncode, new.stdout)
        assert ("copy" in new.stdout) == places.startswith(str(tmp_path))


def test_files_that_it_leaves_open_are_written_and_named(tmp_path: Path) -> None:
    text = f"left = open({str(tmp_path / 'left')!r}, 'w'); left.write('all of it')"
    named = forked.run([sys.executable, "-W", "default", "-c", text], capture_output=True, text=True).stderr
    assert (tmp_path / "left").read_text() == "all of it"
    assert "ResourceWarning: unclosed file" in named


def test_it_ends_as_a_new_interpreter_would() -> None:
    for text in ("raise SystemExit('why')", "raise SystemExit(258)", "raise SystemExit(None)", "raise SystemExit(-1)"):
        forks, new = (
            run([sys.executable, "-c", text], capture_output=True, text=True) for run in (forked.run, subprocess.run)
        )
        assert (forks.returncode, forks.stderr) == (new.returncode, new.stderr)
    assert forked.run([sys.executable, "-c", "raise KeyboardInterrupt"], stderr=subprocess.PIPE).returncode == -2


def test_a_shell_starts_it_as_python(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text("import os, sys; print(sys.stdin.read() * 2, sys.argv[1:], os.environ['OWN'])")
    commands = """\
cd elsewhere; export OWN=one
python -c 'print(7, end="")' | python ../twice.py 'a b' c > written 2> /dev/null
python -c 'import sys; print("why", file=sys.stderr); sys.exit(3)' || echo $?
python -c 'import os, signal; os.kill(os.getpid(), signal.SIGKILL)' || echo $?
exec python -c 'import sys; print(len(sys.modules) > 1000, flush=True); sys.exit(5)'
"""
    (tmp_path / "elsewhere").mkdir()
    with forked_python(tmp_path / "programs") as environment:
        done = subprocess.run(
            ["bash", "-c", commands], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )
    assert (done.returncode, done.stdout.splitlines()) == (5, ["3", "137", "True"]), done.stderr
    assert (tmp_path / "elsewhere" / "written").read_text() == "77 ['a b', 'c'] one\n"
    assert done.stderr.startswith("why\n")
