"""Published test cases of other projects: lines of a trace, and the answers that the source expects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal
from typing import Any, Protocol

Line = dict[str, Any]
Rule = dict[str, Any]


class Replays(Protocol):
    def step(self, line: Line) -> dict[str, Any]: ...


OpenReplay = Callable[[Any], Replays]


@dataclass(frozen=True)
class Table:
    """Lines of a trace, each with the parts of the answer that the source states."""

    name: str
    source: str
    rule: Any
    steps: tuple[tuple[Line, dict[str, Any]], ...]

    def play(self, open_replay: OpenReplay) -> None:
        replay = open_replay(self.rule)
        for number, (line, expected) in enumerate(self.steps, start=1):
            answer = replay.step(line)
            told = {field: answer[field] for field in expected}
            assert told == expected, f"{self.name}, line {number}: {line}"


@dataclass(frozen=True)
class Events:
    """A case in the notation of Guava's tests.

    R0.20 is an acquire that waits 0.20 s. U0.50 is half a second without requests. `acquire(3) R0.00` takes three
    permits. `rate 4` changes the rate.
    """

    name: str
    source: str
    rule: Rule
    events: str

    def play(self, open_replay: OpenReplay) -> None:
        replay = open_replay(self.rule)
        at = Decimal(0)
        rule = self.rule
        replay.step({"at": at, "op": "create"})
        for number, event in enumerate(self.events.split(", "), start=1):
            if event.startswith("U"):
                at += Decimal(event[1:])
            elif event.startswith("rate "):
                rule = rule | {"rate": Decimal(event[5:])}
                replay.step({"at": at, "op": "set_rule", "rule": rule})
            else:
                call, _, waited = event.rpartition("R")
                cost = int(call[len("acquire(") : -2]) if call else 1
                answer = replay.step({"at": at, "op": "acquire", "cost": cost})
                assert answer["allowed"], f"{self.name}, event {number}"
                wait = Decimal(repr(answer["wait"]))
                told = wait.quantize(Decimal("0.01"), ROUND_HALF_UP)
                assert told == Decimal(waited), f"{self.name}, event {number}: waited {wait}, not {waited}"
                at += wait


def tries(*steps: tuple[Any, ...]) -> tuple[tuple[Line, dict[str, Any]], ...]:
    """Return a table from rows of (at, cost, allowed)."""
    return tuple(({"at": Decimal(str(at)), "cost": cost}, {"allowed": allowed}) for at, cost, allowed in steps)


def patient(*steps: tuple[Any, ...]) -> tuple[tuple[Line, dict[str, Any]], ...]:
    """Return a table from rows of (at, cost, timeout, allowed)."""
    return tuple(
        ({"at": Decimal(str(at)), "cost": cost, "timeout": Decimal(str(timeout))}, {"allowed": allowed})
        for at, cost, timeout, allowed in steps
    )
