"""Show that the tests find faults: `python -m tests.long.faults [--complete] [--bills] [--jobs N] [phrase …]`.

tests/long/mistakes.py lists small mistakes, at least one in almost every room. The command makes a copy of the working
tree, plants one mistake after the other there, and runs the tests of its room that a quick run has (see
tests/support/selection.py) until the first one fails. It prints a line for each mistake. With `--complete`, it also
runs the other tests of the room if the quick tests do not find the mistake. The phrases choose mistakes by their names
and files. `--bills` plants those of tests/long/mistakes_in_bills.py instead, and all tests of each must find it.

The exit status is 1 if the quick tests find fewer than nine of ten mistakes, or if with `--complete` no test of the
room finds one.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from typing import NamedTuple

import pytest

from tests.long.mistakes import FAULTS, Fault
from tests.long.mistakes_in_bills import IN_BILLS
from tests.long.planting import ROOT, changed
from tests.support.selection import SAMPLE

#: The share of the mistakes that the quick tests must find.
ENOUGH = 0.9
#: Maximum seconds of one run. No room's tests take so long, so a run that is not over by then hangs.
_TIMEOUT = 1800
#: How pytest names a test that failed, in the lines at its end.
_FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", re.MULTILINE)


class Found(NamedTuple):
    """Which test found a mistake ("" for none), whether a quick run has this test, and the seconds until it failed."""

    fault: Fault
    test: str
    quick: bool
    seconds: float


def copy_tree(folder: Path) -> Path:
    """Copy the files of the working tree, with their changes, into a folder, and return it."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        if (ROOT / name).exists():  # not deleted
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@contextmanager
def planted(fault: Fault, folder: Path) -> Iterator[None]:
    """Within the block, a copy of the tree has the mistake."""
    path = folder / "ratelimits" / fault.file
    path.write_text(changed(path.read_text(), fault.text, fault.instead, fault.file))
    try:
        yield
    finally:
        shutil.copy2(ROOT / "ratelimits" / fault.file, path)


def first_failure(folder: Path, *arguments: str) -> str:
    """Run tests in a copy of the tree until one fails, and return its name; "" if all pass.

    Raise RuntimeError if pytest ends in another way.
    """
    options = ["-x", "-q", "--no-header", "--tb=no", "-n", "0", "-p", "no:randomly"]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    done = subprocess.run(
        command, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT, check=False
    )
    failed = _FAILED.search(done.stdout)
    if done.returncode == pytest.ExitCode.TESTS_FAILED and failed:
        return failed[1]
    if done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        return ""
    raise RuntimeError(f"{' '.join(arguments)} ended with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr}")


def find(fault: Fault, folder: Path, *, complete: bool) -> Found:
    """Run the quick tests of the mistake's room, and with `complete` then the other ones."""
    place = f"tests/{fault.tests}"
    began, test, quick = time.monotonic(), "", True
    with planted(fault, folder):
        test = first_failure(folder, "-m", "not slow", place)
        if not test and (sample := [f"tests/{name}" for name in SAMPLE if f"tests/{name}".startswith(f"{place}/")]):
            test = first_failure(folder, *sample)
        if not test and complete:
            test, quick = first_failure(folder, "-m", "slow and not system", place), False
    return Found(fault, test, quick and bool(test), time.monotonic() - began)


def find_all(faults: Sequence[Fault], *, complete: bool, jobs: int) -> Iterator[Found]:
    """Yield where each mistake was found. At the end, raise RuntimeError if these tests fail without mistakes too."""
    with TemporaryDirectory(prefix="ratelimits-faults-") as directory, ThreadPoolExecutor(jobs) as pool:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            copies.put(copy_tree(Path(directory) / str(number)))

        def in_a_copy(fault: Fault) -> Found:
            folder = copies.get()
            try:
                return find(fault, folder, complete=complete)
            finally:
                copies.put(folder)

        tests = []
        for found in pool.map(in_a_copy, faults):
            tests += [found.test] if found.test else []
            yield found
        if tests and (failed := first_failure(copies.get(), *dict.fromkeys(tests))):
            raise RuntimeError(f"{failed} fails without a mistake too")


def main(arguments: Sequence[str]) -> int:
    """Print where each mistake was found, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--complete", action="store_true", help="run a room's other tests for what its quick ones miss")
    parser.add_argument("--bills", action="store_true", help="plant the mistakes in periods, customers and bills")
    parser.add_argument("--jobs", type=int, default=1, help="how many mistakes are tried at the same time")
    parser.add_argument("phrases", nargs="*", metavar="phrase", help="a part of a mistake's name or file")
    options = parser.parse_args(arguments)
    phrases = options.phrases or [""]
    complete = options.complete or options.bills
    faults = IN_BILLS if options.bills else FAULTS
    chosen = [fault for fault in faults if any(phrase in f"{fault.file} {fault.name}" for phrase in phrases)]
    quick = missed = 0
    for found in find_all(chosen, complete=complete, jobs=options.jobs):
        how = "quick" if found.quick else "only complete" if found.test else "NOT FOUND"
        print(f"{how:13} {found.seconds:4.0f} s  {found.fault.file}: {found.fault.name}  {found.test}", flush=True)
        quick += found.quick
        missed += not found.test
    rooms = len({fault.room for fault in chosen})
    print(f"The quick tests found {quick} of {len(chosen)} mistakes in {rooms} rooms; {missed} were not found.")
    enough = options.bills or quick >= ENOUGH * len(chosen)
    return 0 if chosen and enough and (not complete or not missed) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
