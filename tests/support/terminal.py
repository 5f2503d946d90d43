"""A terminal for a test, with the text that was written to it."""

from __future__ import annotations

import contextlib
import os
import pty


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
