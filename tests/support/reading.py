"""Let the processes of pytest-xdist compile the test modules together.

Each process reads all modules of the run in the same order. In a fresh clone each would also compile them all, and this
takes longer than to read them. So each process begins at another module, and finds the others compiled.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.support.selection import left_out_as


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import the modules of the run, beginning at another one in each process. The collection tells of errors."""
    worker: dict[str, Any] | None = getattr(session.config, "workerinput", None)
    if worker is None:
        return
    modules = sorted(_modules(session.config))
    first = len(modules) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    for path in modules[first:] + modules[:first]:
        with suppress(Exception, pytest.skip.Exception):
            import_module(".".join(path.relative_to(session.config.rootpath).with_suffix("").parts))


def _modules(config: pytest.Config) -> Iterator[Path]:
    for argument in config.args:
        place = config.invocation_params.dir / argument.partition("::")[0]
        for path in place.rglob("test_*.py") if place.is_dir() else (place,):
            if left_out_as(path, config) is None:
                yield path
