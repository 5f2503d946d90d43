"""A terminal for a test, with the text that was written to it."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import re
from typing import Any

from django.core.management import call_command

#: A part of a progress bar.
BAR = "━"


class Terminal:
    """A terminal, and the text written to it."""

    def __init__(self) -> None:
        self._ours, theirs = pty.openpty()
        self.file = os.fdopen(theirs, "w")

    def read(self) -> str:
        """Return all text.

        A read returns what is there, and fails when no process can write to the terminal any more.
        """
        self.file.close()
        shown = b""
        with contextlib.suppress(OSError):
            while some := os.read(self._ours, 65_536):
                shown += some
        os.close(self._ours)
        return shown.decode()


def plain(text: str) -> str:
    """Return the text without colours and movements of the cursor."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def on_a_terminal(name: str, *arguments: str, **options: Any) -> str:
    """Run a command whose standard error is a terminal; return the text that the terminal shows."""
    terminal = Terminal()
    try:
        call_command(name, *arguments, stdout=io.StringIO(), stderr=terminal.file, **options)
    finally:
        text = terminal.read()
    return plain(text)


def stages(text: str) -> set[str]:
    """Return the names in front of the bars."""
    return set(re.findall(rf"^([a-z ]+?) +[{BAR}╸]", text.replace("\r", "\n"), re.MULTILINE))
