from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.row import Row, write


@pytest.fixture(scope="session")
def reliability(pytestconfig: pytest.Config) -> Iterator[list[Row]]:
    """Collect the rows of all faults. With `--reliability`, write them into a page at the end."""
    rows: list[Row] = []
    yield rows
    page: str | None = pytestconfig.option.reliability
    if page:
        write(Path(page), rows)
