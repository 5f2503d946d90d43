"""The named steps of the pipeline, so that tests can end a process between any two of them.

`reached` is called with the step's name and does nothing; a test puts its own callable there, in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable

#: Every step, in the order of one pass: sealing, draining, tallying, compacting.
POINTS = (
    "seal:before",
    "seal:after",
    "drain:listed",
    "drain:fenced",
    "drain:read",
    "drain:locked",
    "drain:batch-written",
    "drain:lines-written",
    "drain:state-written",
    "drain:committed",
    "drain:dropped",
    "drain:watermark-locked",
    "drain:watermark-written",
    "tally:locked",
    "tally:added",
    "tally:committed",
    "compact:locked",
    "compact:deleted",
    "compact:written",
    "compact:committed",
)
#: Every step of closing, and of pushing to a billing system.
CLOSE_POINTS = (
    "close:locked",
    "close:report-written",
    "close:lines-written",
    "close:adjustments-marked",
    "close:marked",
    "close:committed",
)
PUSH_POINTS = (
    "push:locked",
    "push:lines-planned",
    "push:planned",
    "push:plan-committed",
    "push:claimed",
    "push:connected",
    "push:answered",
    "push:receiver-written",
    "push:outcome-written",
    "push:marked",
    "push:held",
)


def _nothing(point: str) -> None:
    return


reached: Callable[[str], None] = _nothing
