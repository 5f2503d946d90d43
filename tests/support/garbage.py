"""Collect garbage in a process that has run many tests."""

from __future__ import annotations

import gc


def collect_garbage() -> None:
    """Free the objects that only refer to each other, and hide all others from later collections.

    A collection looks at every object that is not hidden: after a thousand tests, this takes 0.2 s each time.
    """
    gc.collect()
    gc.freeze()
