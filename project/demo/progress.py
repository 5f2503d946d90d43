"""Show what the demo does at the moment, and for how long: as a moving line on a terminal, otherwise as plain lines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, SpinnerColumn, TextColumn
from rich.progress import TimeElapsedColumn as Elapsed

#: Seconds between two plain lines about the same step.
_INTERVAL = 5.0


@contextmanager
def step(console: Console, text: str, total: int | None = None) -> Iterator[Callable[[], None]]:
    """Show a step of the demo within the block. Yield a function that notes that one more of `total` is done."""
    # A dumb terminal shows no moving line.
    shown = _moving if console.is_terminal and not console.is_dumb_terminal else _plain
    with shown(console, text, total) as advance:
        yield advance


@contextmanager
def _moving(console: Console, text: str, total: int | None) -> Iterator[Callable[[], None]]:
    counted = (BarColumn(), MofNCompleteColumn()) if total else ()
    columns: tuple[ProgressColumn, ...] = (SpinnerColumn("line"), TextColumn("{task.description}"), *counted, Elapsed())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(text, total=total)
        yield lambda: progress.advance(task)
        if total is None:
            progress.update(task, total=1, completed=1)


@contextmanager
def _plain(console: Console, text: str, total: int | None) -> Iterator[Callable[[], None]]:
    console.print(text, soft_wrap=True)
    began, done, lock, ended = time.monotonic(), 0, threading.Lock(), threading.Event()

    def advance() -> None:
        nonlocal done
        with lock:
            done += 1

    def repeat() -> None:
        while not ended.wait(_INTERVAL):
            amount = f"{done:,} of {total:,}, " if total else ""
            console.print(f"{text}: {amount}{time.monotonic() - began:.0f} s", soft_wrap=True)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield advance
    finally:
        ended.set()
        thread.join()
