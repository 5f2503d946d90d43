"""Collect garbage in a process that has run many tests."""

from __future__ import annotations

import gc


def collect_rarely() -> None:
    """Let Python collect garbage after 50,000 new objects, not after 700.

    To read all tests makes millions of objects that stay. To look at them again and again took a third of this time.
    """
    gc.set_threshold(50_000, 10, 10)


def collect_garbage() -> None:
    """Free the objects that only refer to each other, and hide all others from later collections.

    A collection looks at every object that is not hidden: after a thousand tests, this takes 0.2 s each time.
    """
    gc.collect()
    gc.freeze()
