"""Step the clock of programs that a test starts. Their monotonic clock goes on as before.

Debian's package libfaketime steps the clock of a server. In a Python process it breaks `time.sleep`. So `follow`
replaces there the functions that the app asks for the time.
"""

from __future__ import annotations

import shlex
import time
from datetime import timedelta
from pathlib import Path

from django.utils import timezone

_LIBRARIES = Path("/usr/lib")


class Clock:
    """The clock of some programs. `offset` is how far it is ahead of this machine's clock, in seconds."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "clock"
        self.step(0)

    def step(self, offset: int) -> None:
        """Let the programs' clock be this number of seconds ahead, from now on."""
        self.offset = offset
        new = self.file.with_suffix(".new")
        new.write_text(f"{offset:+d}\n")
        new.replace(self.file)

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of the environment that let a server have this clock."""
        found = sorted(_LIBRARIES.glob("*/faketime/libfaketimeMT.so.1"))
        if not found:
            raise RuntimeError("The clock of a server is stepped by Debian's package libfaketime.")
        return {
            "LD_PRELOAD": str(found[0]),
            "FAKETIME_TIMESTAMP_FILE": str(self.file),
            "FAKETIME_NO_CACHE": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }


def follow(file: Path) -> None:
    """Let this process have the clock that a `Clock` writes into this file."""
    true_time, true_time_ns, true_now = time.time, time.time_ns, timezone.now

    def offset() -> int:
        return int(file.read_text())

    time.time = lambda: true_time() + offset()
    time.time_ns = lambda: true_time_ns() + offset() * 10**9
    timezone.now = lambda: true_now() + timedelta(seconds=offset())


def started_with(binary: Path, folder: Path, environment: dict[str, str]) -> Path:
    """Return a program that starts `binary` with these variables. Writes that a limit of files refuses only fail."""
    variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    program = folder / "server"
    # Without the trap, the signal SIGXFSZ would end the server: on a full disk, a write fails without a signal.
    program.write_text(f"#!/bin/sh\ntrap '' XFSZ\nexec env {variables} {shlex.quote(str(binary))} \"$@\"\n")
    program.chmod(0o755)
    return program
