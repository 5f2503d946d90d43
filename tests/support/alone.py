"""A floor without the floors above it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ratelimits.status import additions


@contextmanager
def alone() -> Iterator[None]:
    """Take away what the floors above add to the pages."""
    before, additions.registered[:] = additions.registered[:], []
    try:
        yield
    finally:
        additions.registered[:] = before
