"""Test that a process stops when it is asked to, whatever it is doing."""

from __future__ import annotations

import sys

from tests.support import forked

_STOPPED = """
import os, signal, sys
from django.core.signals import request_finished
from ratelimits import background

signal.signal(signal.SIGTERM, lambda *args: sys.exit(7))
ended = []
background.watch_signals(lambda *seconds: ended.append(seconds))
request_finished.send(None)
assert ended == []
try:
    with request_finished.lock:
        os.kill(os.getpid(), signal.SIGTERM)
finally:
    request_finished.send(None)
    assert len(ended) == 2, ended
"""


def test_a_signal_in_the_middle_of_the_end_of_a_request_does_not_hang() -> None:
    process = forked.run([sys.executable, "-c", _STOPPED], timeout=120, capture_output=True, text=True)
    assert process.returncode == 7, process.stderr
