"""Start Python processes in a third of the time, for tests that do not test the start itself.

A new interpreter needs 0.6 s of processor time to import Django and the other packages. So each test session has a
*nursery*: a process that has imported them, and those modules of the app that need no settings. `Forked` is a
`subprocess.Popen` whose process is a fork of the nursery. It has its own arguments, environment, folder and files, and
ends as a new interpreter would end. Where gevent replaces parts of the standard library, use a new interpreter: it must
do so before other packages are imported.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import os
import pickle
import runpy
import select
import signal
import site
import socket
import struct
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fcntl import F_DUPFD_CLOEXEC, fcntl
from importlib.machinery import PathFinder
from io import FileIO
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
#: What the nursery imports: modules that need no settings, and import most of what the app and its servers need.
_PRELOADED = (
    "celery.app.backends",
    "celery.bin.celery",
    "celery.fixups.django",
    "celery.loaders.app",
    "celery.worker.worker",
    "dj_database_url",
    "django.contrib.admin.templatetags.admin_list",
    "django.contrib.admindocs.views",
    "django.contrib.auth.apps",
    "django.contrib.auth.password_validation",
    "django.contrib.staticfiles.apps",
    "django.core.mail.backends.smtp",
    "django.core.management.commands.makemigrations",
    "django.core.management.commands.migrate",
    "django.db.backends.sqlite3.base",
    "django.db.models.sql.compiler",
    "django.test.signals",
    "django_redis.cache",
    "drf_spectacular.utils",
    "gunicorn.app.wsgiapp",
    "kombu.transport.redis",
    "ratelimits.engine.cluster.split",
    "ratelimits.engine.cluster.wire",
    "ratelimits.quota.deny_cache",
    "ratelimits.quota.prefetch",
    "ratelimits.billing.reports.exports",
    "ratelimits.simulate",
    "ratelimits.usage.ledger.fence",
    "rest_framework.authentication",
    "rest_framework.metadata",
    "rest_framework.mixins",
    "rest_framework.permissions",
    "simple_history.template_utils",
    "uvicorn.main",
    "whitenoise.middleware",
)
#: Files (of stdin, stdout, stderr, and of `pass_fds`) that one process may get.
_MOST_FILES = 32
_LENGTH, _STATUS = struct.Struct("=Q"), struct.Struct("=i")


@dataclass(frozen=True, slots=True)
class _Order:
    """A process to start.

    arguments  of Python: a few "-W option", then "-m module", "-c text" or the path of a script, and its arguments
    files      the numbers that its files shall have
    """

    arguments: list[str]
    environment: dict[str, str]
    directory: str
    files: list[int]
    new_session: bool
    first: Callable[[], Any] | None


# In the test session


class Forked(subprocess.Popen[Any]):
    """A Python process as a fork of the nursery. The arguments must begin with `sys.executable`."""

    def _execute_child(
        self,
        args: Sequence[Any],
        executable: Any,
        preexec_fn: Callable[[], Any] | None,
        close_fds: bool,
        pass_fds: Sequence[int],
        cwd: Any,
        env: Any,
        startupinfo: Any,
        creationflags: int,
        shell: bool,
        *more: Any,
    ) -> None:
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, _restore_signals, *users = more
        *ids, new_session, process_group = users
        assert args[0] == sys.executable, args
        assert close_fds
        assert (shell, *ids, process_group) == (False, None, None, None, -1, -1)
        environment = dict(os.environ if env is None else env)
        order = _Order(
            [os.fspath(argument) for argument in args[1:]],
            environment,
            os.fspath(cwd or Path.cwd()),
            [0, 1, 2, *pass_fds],
            bool(new_session),
            preexec_fn,
        )
        own = [given if given != -1 else number for number, given in enumerate((p2cread, c2pwrite, errwrite))]
        readable, writable = os.pipe()
        self._ended: FileIO | None = FileIO(readable)
        try:
            self.pid = _nursery().start(order, [writable, *own, *pass_fds])
        finally:
            os.close(writable)
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)  # type: ignore[attr-defined]

    def _internal_poll(self, *_more: Any, **_others: Any) -> int | None:
        self._wait_for_end(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if not self._wait_for_end(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.returncode

    def _wait_for_end(self, timeout: float | None) -> bool:
        if self._ended is None:
            return True
        if not select.select([self._ended], [], [], timeout)[0]:
            return False
        with self._waitpid_lock:  # type: ignore[attr-defined]
            if self._ended is not None:
                said = self._ended.read(_STATUS.size)
                self._ended.close()
                self._ended = None
                assert said, "the nursery has ended"
                self.returncode = _STATUS.unpack(said)[0]
        return True


def popen_for(gevent: bool) -> type[subprocess.Popen[Any]]:
    """Return what starts a process: a new interpreter with gevent, which must come before all other packages."""
    return subprocess.Popen if gevent else Forked


def run(
    arguments: Sequence[Any],
    *,
    check: bool = False,
    capture_output: bool = False,
    input: str | None = None,  # noqa: A002  (as subprocess.run names it)
    timeout: float | None = None,
    **more: Any,
) -> subprocess.CompletedProcess[Any]:
    """Do what `subprocess.run` does, with a fork of the nursery."""
    if capture_output:
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        more |= {"stdin": subprocess.PIPE}
    with Forked(arguments, **more) as process:
        try:
            output, errors = process.communicate(input, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(arguments, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


class _Nursery:
    """The nursery of this test session."""

    def __init__(self) -> None:
        self._connection, theirs = socket.socketpair()
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("DJANGO", "PYTHONWARN"))}
        self._process = subprocess.Popen(
            [sys.executable, "-c", f"from tests.support.forked import serve; serve({theirs.fileno()})"],
            cwd=ROOT,
            env={**environment, "PYTHONPATH": ""},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._turn = threading.Lock()

    def start(self, order: _Order, files: list[int]) -> int:
        """Start a process. Return its id."""
        assert len(files) <= _MOST_FILES
        sent = pickle.dumps(order)
        with self._turn:
            socket.send_fds(self._connection, [_LENGTH.pack(len(sent))], files)
            self._connection.sendall(sent)
            (pid,) = _STATUS.unpack(_read(self._connection, _STATUS.size))
        return int(pid)

    def end(self) -> None:
        self._connection.close()
        self._process.wait()


@functools.cache
def _nursery() -> _Nursery:
    nursery = _Nursery()
    atexit.register(end)
    return nursery


def end() -> None:
    """End the nursery, if there is one."""
    if _nursery.cache_info().currsize:
        _nursery().end()
        _nursery.cache_clear()


def _read(connection: socket.socket, size: int) -> bytes:
    """Read this number of bytes. Raise EOFError if the other side has ended."""
    parts = b""
    while len(parts) < size:
        if not (part := connection.recv(size - len(parts))):
            raise EOFError
        parts += part
    return parts


# In the nursery


def serve(descriptor: int) -> None:
    """Start processes until the test session ends. Return in no process before this: forks run here, and then exit."""
    for module in _PRELOADED:
        importlib.import_module(module)
    from django.conf import settings

    assert not settings.configured
    assert "ratelimits.models" not in sys.modules
    assert threading.active_count() == 1
    gc.collect()
    gc.freeze()  # so that the forks do not write to the shared memory
    statuses: dict[int, int] = {}

    def ended(*_arguments: Any) -> None:
        while statuses:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            writable = statuses.pop(pid)
            with suppress(BrokenPipeError):  # nobody waits for it any more
                os.write(writable, _STATUS.pack(os.waitstatus_to_exitcode(status)))
            os.close(writable)

    own_path = sys.path[1:]  # without the folder of this process
    signal.signal(signal.SIGCHLD, ended)
    connection = socket.socket(fileno=descriptor)
    while True:
        try:
            head, files, _flags, _address = socket.recv_fds(connection, _LENGTH.size, _MOST_FILES)
            if not head:
                return
            order: _Order = pickle.loads(_read(connection, *_LENGTH.unpack(head)))
        except (EOFError, ConnectionError):
            return
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
            connection.detach()
            _end(_status_of(order, files[1:], own_path))
        statuses[pid] = files[0]
        connection.sendall(_STATUS.pack(pid))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        for file in files[1:]:
            os.close(file)


def _become(order: _Order, files: list[int], path: list[str]) -> None:
    """Make this process as the order says, and do its work."""
    above = max(*order.files, *files) + 1
    moved = [fcntl(file, F_DUPFD_CLOEXEC, above) for file in files]
    for file, number in zip(moved, order.files, strict=True):
        os.dup2(file, number)
    for lower, higher in pairwise([*sorted(order.files), os.sysconf("SC_OPEN_MAX")]):
        if higher > lower + 1:
            os.closerange(lower + 1, higher)
    if order.new_session:
        os.setsid()
    os.chdir(order.directory)
    os.environ.clear()
    os.environ.update(order.environment)
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        old = getattr(sys, name)
        new = open(number, old.mode, encoding=old.encoding, errors=old.errors, closefd=False)  # noqa: SIM115
        new.reconfigure(line_buffering=name == "stderr" or new.isatty(), write_through=unbuffered)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    arguments = list(order.arguments)
    options = os.environ.get("PYTHONWARNINGS", "").split(",") if os.environ.get("PYTHONWARNINGS") else []
    while arguments[0] == "-W":
        options.append(arguments[1])
        del arguments[:2]
    sys.warnoptions[:] = options
    warnings._processoptions(options)  # type: ignore[attr-defined]
    sys.orig_argv = [sys.executable, *order.arguments]
    places = [place for place in os.environ.get("PYTHONPATH", "").split(":") if place]
    sys.path[:] = ["", *places, *path]
    _forget("tests")
    importlib.invalidate_caches()
    spec = PathFinder.find_spec("ratelimits", [str(_folder(arguments)), *sys.path[1:]])
    if spec is None or spec.origin != sys.modules["ratelimits"].__file__:
        _forget("ratelimits")
    site.execsitecustomize()  # of PYTHONPATH
    if order.first is not None:
        order.first()
    _run(arguments)


def _forget(package: str) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]


def _folder(arguments: list[str]) -> Path:
    """Return the folder in which a new interpreter would look for modules first."""
    return Path.cwd() if arguments[0] in ("-m", "-c") else Path(arguments[0]).resolve().parent


def _run(arguments: list[str]) -> None:
    """Run what a new interpreter would run with these arguments."""
    main = sys.modules["__main__"].__dict__
    main.pop("serve", None)
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        sys.path[0] = str(_folder(arguments))
        runpy._run_module_as_main(arguments[1])  # type: ignore[attr-defined]
    elif arguments[0] == "-c":
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), main)
    else:
        sys.argv = arguments
        sys.path[0] = str(_folder(arguments))
        main["__file__"] = str(Path(arguments[0]).absolute())
        exec(compile(Path(arguments[0]).read_text(), arguments[0], "exec"), main)


def _status_of(order: _Order, files: list[int], path: list[str]) -> int:
    """Follow the order. Return the status with which a new interpreter would end, and print the error, if any."""
    try:
        _become(order, files, path)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        print(error.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        raise  # The interpreter then ends by the signal.
    except BaseException:  # noqa: BLE001  (as the interpreter does)
        sys.excepthook(*sys.exc_info())
        return 1
    return 0


def _end(status: int) -> NoReturn:
    """Do what an interpreter does at its end, but do not free all memory: this takes a third of a short process."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    # Close files of the program that it has left open, and warn of them.
    sys.modules["__main__"].__dict__.clear()
    gc.collect()
    for file in (sys.stdout, sys.stderr):
        try:
            file.flush()
        except OSError:
            status = 120
    os._exit(status & 0xFF)
