"""Give shell commands a program `python` whose processes are forks (tests/support/forked.py).

The program itself is a small script: it hands its arguments, environment, folder and files to the test session. The
session starts the process, and answers with its exit status.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.support.forked import Forked

#: It imports only what an interpreter without `site` imports in some milliseconds.
_PROGRAM = """\
#!{python} -IS
import os, pickle, socket, sys

with socket.socket(socket.AF_UNIX) as session:
    session.connect({address!r})
    order = pickle.dumps((sys.argv[1:], dict(os.environ), os.getcwd()))
    socket.send_fds(session, [len(order).to_bytes(8, "big")], [0, 1, 2])
    session.sendall(order)
    sys.exit(int(session.recv(8)))
"""


@contextmanager
def forked_python(folder: Path) -> Iterator[dict[str, str]]:
    """Write a program `python` into the folder. Yield an environment whose PATH finds it, within the block."""
    folder.mkdir(exist_ok=True)
    # The name of a socket has at most some hundred characters: too few for the folder of a test.
    with socket.socket(socket.AF_UNIX) as server, TemporaryDirectory() as short:
        address = f"{short}/session"
        server.bind(address)
        server.listen()
        program = folder / "python"
        program.write_text(_PROGRAM.format(python=sys.executable, address=address))
        program.chmod(0o755)
        accepting = threading.Thread(target=_accept, args=(server,))
        accepting.start()
        try:
            yield {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        finally:
            server.shutdown(socket.SHUT_RDWR)
            accepting.join()


def _accept(server: socket.socket) -> None:
    """Serve each program in a thread, because those of a pipe run at the same time."""
    while True:
        try:
            program, _address = server.accept()
        except OSError:  # the block is over
            return
        threading.Thread(target=_serve, args=(program,)).start()


def _serve(program: socket.socket) -> None:
    with program, program.makefile("rb") as sent:
        head, files, _flags, _address = socket.recv_fds(program, 8, 3)
        arguments, environment, directory = pickle.loads(sent.read(int.from_bytes(head, "big")))
        stdin, stdout, stderr = files
        process = Forked(
            [sys.executable, *arguments], stdin=stdin, stdout=stdout, stderr=stderr, cwd=directory, env=environment
        )
        for file in files:
            os.close(file)
        with process:
            status = process.wait()
        program.sendall(b"%d" % (status if status >= 0 else 128 - status))
