from __future__ import annotations

import pytest

from tests.usage.conftest import _fsync_at_once  # noqa: F401


@pytest.fixture(autouse=True)
def _at_once(_fsync_at_once: None) -> None:  # noqa: F811
    """No fence has to be waited for."""
