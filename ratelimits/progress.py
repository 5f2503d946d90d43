"""Count how much of a long task is done. The commands show this count on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from threading import Lock
from time import monotonic
from typing import NamedTuple, TypeVar

Thing = TypeVar("Thing")


class Stage(NamedTuple):
    """A stage of a task.

    what   the things that the stage counts, such as "ledger lines"
    total  how many there are; None if this is not known
    done   returns how many are done. Another thread calls it, so it must not use the database
    began  the moment when the stage began, by `time.monotonic`
    """

    what: str
    total: int | None
    done: Callable[[], int]
    began: float


class Progress:
    """The stages of a task that have begun, in order. While the task adds stages, another thread can read them."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []

    def begin(self, what: str, total: int | None, done: Callable[[], int]) -> None:
        """Begin a stage; the arguments are the fields of `Stage`. The previous stage is then over.

        A stage without things (`total` is 0) is left out.
        """
        if total != 0:
            self.stages.append(Stage(what, total, done, monotonic()))

    def counter(self, what: str, total: int | None) -> Callable[[int], None]:
        """Begin a stage. Return a function that adds to the number of things done; any thread can call it."""
        count, lock = 0, Lock()

        def add(things: int) -> None:
            nonlocal count
            with lock:
                count += things

        self.begin(what, total, lambda: count)
        return add

    def counted(self, what: str, things: Iterable[Thing], total: int | None = None) -> Iterator[Thing]:
        """Begin a stage and yield its things. A thing is done when the next one is asked for."""
        count = 0
        self.begin(what, total, lambda: count)
        for thing in things:
            yield thing
            count += 1
