"""Make what several tests share once for a whole run, however many workers of pytest-xdist have these tests."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(
    name: str, config: pytest.Config, tmp_path_factory: pytest.TempPathFactory, make: Callable[[Path], None]
) -> Path:
    """Return the folder of this name in which `make` wrote files. The first worker makes them, and the others wait."""
    base = tmp_path_factory.getbasetemp()
    # The folder of a worker is in the folder of the run.
    run = base.parent if hasattr(config, "workerinput") else base
    folder, done = run / name, run / f"{name}.done"
    with (run / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            make(folder)
            done.touch()
    return folder
