from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _at_once(fsync_at_once: None) -> None:
    """Have the server fsync at once, so that no test waits for the fence."""
