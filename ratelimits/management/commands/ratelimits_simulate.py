"""The command `ratelimits_simulate`: show what a rule would have decided about recorded requests."""

from __future__ import annotations

import io
import json
import os
import select
import signal
import sys
import threading
from argparse import ArgumentParser
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice
from types import FrameType
from typing import Any, BinaryIO, NoReturn

from django.core.management.base import CommandError

from ratelimits.embedded import ServerStartError
from ratelimits.engine.transport.connection import Unavailable
from ratelimits.management.help import ExplainedCommand
from ratelimits.management.progress import shown
from ratelimits.simulate import (
    BadLine,
    Reader,
    Replay,
    Rules,
    Simulator,
    Summary,
    TraceLine,
    clean,
    decode_json,
    json_lines,
    read_rules,
    sandbox,
)

#: Exit status after a line that cannot be read, and for wrong arguments.
BAD_INPUT = 2
#: Number of results that are printed together, and of finished replays whose states are deleted together.
_RESULTS_AT_ONCE, _REPLAYS_AT_ONCE = 1000, 500
#: While the command waits for its input, seconds until it notices a signal that did not interrupt this.
_SIGNALS_AFTER = 1.0


class Command(ExplainedCommand):
    """Replay traces with the real scripts and a virtual clock. This needs no database."""

    help = (
        "Decides the requests of a trace (JSON lines) by a rule, and prints one result for each line. If REDIS_URL is"
        " set, the command uses the server at this URL and leaves no keys there. Otherwise the command starts its own"
        " server."
    )
    examples = (
        "--rule rule.json --trace trace.jsonl",
        "--rule rule.json --trace trace.jsonl --summary",
        "--batch replays.jsonl",
    )
    exit_codes = {
        0: "every line was answered",
        1: "the server does not answer, or the program that reads the results closed the pipe",
        2: "a bad line, a bad rule or wrong options",
    }
    requires_system_checks = ()
    requires_migrations_checks = False

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--rule",
            metavar="FILE",
            help=("a JSON file with the rule, or with a list of rules that are decided together"),
        )
        parser.add_argument(
            "--trace", metavar="FILE|-", help=("a file with the trace as JSON lines (default: standard input)")
        )
        parser.add_argument(
            "--batch",
            metavar="FILE|-",
            help='a file with many replays: JSON lines {"rule": …, "trace": […]}; each replay starts without usage',
        )
        parser.add_argument("--summary", action="store_true", help="print a readable summary instead of the results")

    def handle(self, *args: Any, **options: Any) -> None:
        rule, trace, batch = options["rule"], options["trace"], options["batch"]
        if batch is not None and (rule is not None or trace is not None or options["summary"]):
            raise CommandError(
                "--batch cannot be used with other options: each line of its file contains a rule", returncode=BAD_INPUT
            )
        if batch is None and rule is None:
            raise CommandError("give a rule with --rule FILE, or many replays with --batch FILE", returncode=BAD_INPUT)
        try:
            with ExitStack() as stack:
                stop = stack.enter_context(_stoppable())
                file = stack.enter_context(_opened(batch or trace or "-", stop))
                # Results are printed while the trace is read. On a terminal, progress would stand between the results,
                # so show none. A summary is printed at the end, so with --summary progress can always be shown.
                progress = stack.enter_context(shown(self, alone=not options["summary"]))
                texts = progress.counted("lines", file, _line_count(file) if self.stderr.isatty() else None)
                if batch is not None:
                    self._batch(stack, texts)
                else:
                    self._trace(stack, stop, rule, texts, options["summary"])
        except BrokenPipeError:
            # The program that reads the results has closed the pipe. Python must not flush the remaining results.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except (ServerStartError, Unavailable) as error:
            raise CommandError(f"the server does not answer: {error}") from error

    def _trace(self, stack: ExitStack, stop: _Stop, rule: str, trace: Iterable[bytes], summarise: bool) -> None:
        with _opened(rule, stop) as file:
            try:
                rules = read_rules(decode_json(file.read()))
            except ValueError as error:
                self._fail(f"{rule}: {error}")
        replay = _Replay(rules, json_lines(trace))
        outcomes = _simulator(stack).run(replay.lines())
        if summarise:
            summary = Summary()
            for _, line, outcome in outcomes:
                summary.add(line, outcome)
        else:
            while chunk := [outcome.json() for _, _, outcome in islice(outcomes, _RESULTS_AT_ONCE)]:
                self.stdout.write("\n".join(chunk))
        if replay.error is not None:
            self.stdout.flush()
            self._fail(f"line {replay.error.number}: {replay.error}")
        if summarise:
            self.stdout.write("\n".join(summary.text()))

    def _batch(self, stack: ExitStack, batch: Iterable[bytes]) -> None:
        simulator = _simulator(stack)
        #: The replays that were read and not yet printed, in the order of the file.
        unfinished: deque[_Replay] = deque()
        #: The printed replays whose states must still be deleted.
        finished_replays: list[_Replay] = []
        failed = 0

        def lines() -> Iterator[tuple[_Replay, TraceLine]]:
            for number, text in enumerate(batch):
                if text.strip():
                    # Each replay has a prefix of its own for its keys, so that it starts without usage.
                    unfinished.append(_parse_replay(text, f"{number}:"))
                    yield from unfinished[-1].lines()

        def finished() -> Iterator[_Replay]:
            for replay, _, outcome in simulator.run(lines()):
                assert isinstance(replay, _Replay)
                replay.results.append(outcome.json())
                while unfinished and unfinished[0].complete:
                    yield unfinished.popleft()
            # Replays that became complete after the last outcome, such as replays without lines.
            yield from unfinished

        for replay in finished():
            self.stdout.write(replay.as_json())
            failed += replay.error is not None
            finished_replays.append(replay)
            if len(finished_replays) >= _REPLAYS_AT_ONCE:
                simulator.forget(finished_replays)
                finished_replays = []
        if failed:
            self.stdout.flush()
            self._fail(f"Replays with an error: {failed}. Their results contain the errors.")

    def _fail(self, message: str) -> NoReturn:
        self.stderr.write(message)
        sys.exit(BAD_INPUT)


class _Replay(Replay):
    """A replay of the lines of a trace, up to the first bad line. `error` is about the bad line."""

    def __init__(
        self, rules: Rules, numbered_lines: Iterable[tuple[int, Any]], prefix: str = "", error: BadLine | None = None
    ) -> None:
        super().__init__(rules, prefix)
        self.error = error
        self.results: list[str] = []
        self._reader = Reader(rules)
        self._numbered_lines = numbered_lines
        self._line_count = 0
        self._all_read = False

    def lines(self) -> Iterator[tuple[_Replay, TraceLine]]:
        """Yield the lines up to the first bad line."""
        to_line = self._reader.line
        for number, data in self._numbered_lines:
            try:
                line = to_line(data)
            except ValueError as error:
                self.error = BadLine(number, str(error))
                break
            self._line_count += 1
            yield self, line
        self._all_read = True

    @property
    def complete(self) -> bool:
        """Return whether all lines were read and have results."""
        return self._all_read and len(self.results) == self._line_count

    def as_json(self) -> str:
        """Return the results, and the error if there is one, as a JSON object."""
        text = f'{{"results": [{", ".join(self.results)}]'
        if self.error is not None:
            text += f', "error": {json.dumps({"line": self.error.number, "message": str(self.error)})}'
        return text + "}"


def _parse_replay(text: bytes, prefix: str) -> _Replay:
    """Return the replay in a line of the batch file. If it cannot be read, return a replay that has only the error."""
    try:
        data = decode_json(text)
        if not isinstance(data, dict) or set(data) != {"rule", "trace"} or not isinstance(data["trace"], list):
            raise ValueError('a replay must be an object {"rule": {…} or […], "trace": [{…}, …]}')
        return _Replay(read_rules(data["rule"]), enumerate(data["trace"], 1), prefix)
    except ValueError as error:
        not_in_trace = 0  # instead of the number of a line of the trace
        return _Replay(rules=(), numbered_lines=(), prefix=prefix, error=BadLine(not_in_trace, str(error)))


class _Input(io.FileIO):
    """An input that may wait for long for its next bytes, and whose reader still obeys SIGTERM."""

    def __init__(self, file: str | int, stop: _Stop) -> None:
        super().__init__(file, "rb", closefd=isinstance(file, str))
        self._stop = stop

    def readinto(self, buffer: Any) -> int | None:
        self._stop.obey()
        # A signal that comes just before a system call does not interrupt it. So never wait in one for long.
        while not select.select([self], [], [], _SIGNALS_AFTER)[0]:
            self._stop.obey()
        return super().readinto(buffer)


def _opened(name: str, stop: _Stop) -> BinaryIO:
    """Open a file, or standard input for "-", to read bytes. Raise CommandError if the file cannot be opened."""
    try:
        return io.BufferedReader(_Input(sys.stdin.fileno() if name == "-" else name, stop))
    except OSError as error:
        raise CommandError(f"{name}: {error.strerror}", returncode=BAD_INPUT) from error


def _line_count(file: BinaryIO) -> int | None:
    """Return the number of lines of a file; None if it can be read only once, such as a pipe."""
    if not file.seekable():
        return None
    start = file.tell()
    count = sum(1 for _line in file)
    file.seek(start)
    return count


def _simulator(stack: ExitStack) -> Simulator:
    """Return a simulator that `stack` closes. First delete what killed simulations have left on its server."""
    wire = stack.enter_context(sandbox())
    clean(wire)
    return stack.enter_context(Simulator(wire))


class _Stop:
    """A handler of SIGTERM that raises SystemExit, so that the command deletes its keys and ends its server."""

    def __init__(self) -> None:
        self._told = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._told = True
        self.obey()

    def obey(self) -> None:
        """Raise SystemExit if the signal has come, again if need be: Python ignores what a destructor raises."""
        if self._told:
            # By convention, the exit status of a process that a signal ends is 128 plus the number of the signal.
            sys.exit(128 + signal.SIGTERM)


@contextmanager
def _stoppable() -> Iterator[_Stop]:
    """Handle SIGTERM within the block."""
    stop = _Stop()
    if threading.current_thread() is not threading.main_thread():  # only the main thread can handle signals
        yield stop
        return
    previous_handler = signal.signal(signal.SIGTERM, stop)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
