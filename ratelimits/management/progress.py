"""Show the progress of a command on a terminal: what is done, how fast, and when it will end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from time import monotonic
from typing import IO, Any, NamedTuple, cast

from django.core.management.base import BaseCommand, OutputWrapper
from django.core.management.color import no_style

from ratelimits.progress import Progress, Stage

#: Seconds between two updates.
_INTERVAL = 0.2


class _Display(NamedTuple):
    """A way to show stages on a terminal.

    draw   shows the stages that have begun, and how much of each is done. At the end of the command, it is called with
           `last=True`
    above  takes a file, and returns a file to use instead: text that is written to the returned file appears above the
           stages
    """

    draw: Callable[[Sequence[Stage], bool], None]
    above: Callable[[IO[str]], Any]


@contextmanager
def shown(command: BaseCommand, *, alone: bool = False) -> Iterator[Progress]:
    """Yield a Progress. If standard error is a terminal, show the progress there until the block ends.

    Text that the command writes meanwhile appears above the progress. If `alone` is true and standard output is a
    terminal too, show nothing: `alone` is for commands that write data to standard output.
    """
    progress = Progress()
    if not command.stderr.isatty() or (alone and command.stdout.isatty()):
        yield progress
        return
    with (
        _display(command) as display,
        _replaced(command.stdout, display),
        _replaced(command.stderr, display),
        _drawn(progress, display),
    ):
        yield progress


@contextmanager
def _drawn(progress: Progress, display: _Display) -> Iterator[None]:
    """Draw the stages in another thread until the block ends. Then draw the stages as they are at the end."""
    ended = threading.Event()

    def draw() -> None:
        while not ended.wait(_INTERVAL):
            display.draw(tuple(progress.stages), False)

    thread = threading.Thread(target=draw, name="ratelimits-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        display.draw(tuple(progress.stages), True)


@contextmanager
def _replaced(output: OutputWrapper, display: _Display) -> Iterator[None]:
    """Within the block, let text for this output appear above the progress, if the output is a terminal."""
    # `_out` is the file to which Django's wrapper writes. django-stubs does not know this attribute.
    wrapper = cast("Any", output)
    original = wrapper._out
    if output.isatty():
        wrapper._out = display.above(original)
    try:
        yield
    finally:
        wrapper._out = original


def _display(command: BaseCommand) -> AbstractContextManager[_Display]:
    """Return bars if the library `rich` is installed, otherwise a single line of text."""
    terminal = cast("Any", command.stderr)._out
    try:
        return _bars(terminal, no_color=command.style is no_style())
    except ImportError:
        return _line(terminal)


def _bars(terminal: IO[str], *, no_color: bool) -> AbstractContextManager[_Display]:
    """Show a bar for each stage. Raise ImportError without the library `rich`."""
    from rich import progress as rich
    from rich.console import Console
    from rich.file_proxy import FileProxy
    from rich.text import Text

    class Rate(rich.ProgressColumn):
        def render(self, task: rich.Task) -> Any:
            return Text(_rate(task.completed, task.elapsed or 0), style="progress.data.speed")

    @contextmanager
    def display() -> Iterator[_Display]:
        console = Console(file=terminal, no_color=no_color or None)
        columns = (
            *(rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn()),
            *(Rate(), rich.TimeRemainingColumn(elapsed_when_finished=True)),
        )
        with rich.Progress(*columns, console=console, redirect_stdout=False, redirect_stderr=False) as bars:

            def draw(stages: Sequence[Stage], last: bool) -> None:
                for number, stage in enumerate(stages):
                    if number == len(bars.task_ids):
                        bars.add_task(stage.what, total=stage.total)
                    done, task = stage.done(), bars.task_ids[number]
                    # The newest stage is the only one that is not over.
                    if last or number < len(stages) - 1:
                        bars.update(task, completed=done, total=done)
                        bars.stop_task(task)
                    else:
                        bars.update(task, completed=done)

            yield _Display(draw, lambda file: FileProxy(console, file))

    return display()


@contextmanager
def _line(terminal: IO[str]) -> Iterator[_Display]:
    """Show the current stage in one line."""
    lock = threading.Lock()
    shown_text = ""

    def write(text: str) -> None:
        nonlocal shown_text
        # \r moves the cursor to the start of the line. Write the text twice. The first time, spaces overwrite the rest
        # of a longer old text. The second time, the cursor stays directly after the text.
        terminal.write(f"\r{text:<{len(shown_text)}}\r{text}")
        terminal.flush()
        shown_text = text

    def draw(stages: Sequence[Stage], last: bool) -> None:
        with lock:
            if stages:
                write(_text(stages[-1], last=last))
                if last:
                    terminal.write("\n")

    class FileAbove:
        def __init__(self, file: IO[str]) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        def write(self, text: str) -> None:
            with lock:
                write("")
                self._file.write(text)
                self._file.flush()

    yield _Display(draw, FileAbove)


def _text(stage: Stage, *, last: bool) -> str:
    done, seconds = stage.done(), monotonic() - stage.began
    if last:
        return f"{stage.what}: {done:,}"
    total = f" of {stage.total:,}" if stage.total else ""
    left = f", {(stage.total - done) * seconds / done:,.0f} s left" if stage.total and done else ""
    return f"{stage.what}: {done:,}{total}, {_rate(done, seconds)}{left}"


def _rate(done: float, seconds: float) -> str:
    """Return, as a text, how many things are done per second."""
    rate = done / seconds if seconds else 0
    return f"{rate:,.0f}/s" if rate >= 10 else f"{rate:.1f}/s"
