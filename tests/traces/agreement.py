"""Find traces to which a replay and the model give different answers, and make these traces as short as possible."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from random import Random
from typing import Any, Protocol

from tests.reference import Replay as Model
from tests.traces.traffic import Answer, Line, random_rules, traffic


class Running(Protocol):
    def run(self, lines: Iterable[Line]) -> Iterator[Answer]: ...


Open = Callable[[Any], Running]


@dataclass(frozen=True)
class Disagreement:
    """The first line of a trace to which the replay and the model give different answers."""

    rule: Any
    lines: list[Line]
    expected: Answer
    replied: Any

    def __str__(self) -> str:
        def shown(value: Any) -> str:
            return json.dumps(value, default=float, ensure_ascii=False)

        lines = "\n".join(f"  {shown(line)}" for line in self.lines)
        return f"rule {shown(self.rule)}\n{lines}\n  model  {shown(self.expected)}\n  engine {shown(self.replied)}"


def first_difference(open_replay: Open, rule: Any, lines: list[Line], expected: list[Answer]) -> Disagreement | None:
    replay = open_replay(rule)
    number = -1
    try:
        for number, replied in enumerate(replay.run(lines)):
            if replied != expected[number]:
                return Disagreement(rule, lines[: number + 1], expected[number], replied)
    except Exception as error:  # noqa: BLE001  (any error is the replay's answer)
        number += 1
        return Disagreement(rule, lines, expected[-1], f"{type(error).__name__}: {error}")
    return None


def disagreement(open_replay: Open, rule: Any, lines: list[Line]) -> Disagreement | None:
    """Return the first difference on these lines; None if there is none, or if the model refuses a line."""
    model = Model(rule)
    try:
        expected = [model.step(line) for line in lines]
    except ValueError:
        return None
    return first_difference(open_replay, rule, lines, expected) if lines else None


def shortest(open_replay: Open, found: Disagreement) -> Disagreement:
    """Return a disagreement with as few lines, rules and fields as possible."""
    shrunk = True
    while shrunk:
        shrunk = False
        for number in range(len(found.lines) - 1, -1, -1):
            fewer = disagreement(open_replay, found.rule, found.lines[:number] + found.lines[number + 1 :])
            if fewer is not None:
                found, shrunk = fewer, True
                break
        if not shrunk:
            for number, line in enumerate(found.lines):
                for simpler in _simpler(line):
                    lines = [*found.lines[:number], simpler, *found.lines[number + 1 :]]
                    fewer = disagreement(open_replay, found.rule, lines)
                    if fewer is not None:
                        found, shrunk = fewer, True
                        break
                if shrunk:
                    break
    return found


def _simpler(line: Line) -> Iterator[Line]:
    for field in ("key", "lease", "timeout", "cost"):
        if field in line:
            yield {name: value for name, value in line.items() if name != field}
    if "cost" in line and line["cost"] > 2:
        yield line | {"cost": 2}
    if line.get("op") in ("acquire", "peek"):
        yield line | {"op": "try_acquire"}
    if line["at"] != int(line["at"]):
        yield line | {"at": Decimal(int(line["at"]))}


def trace(algorithm: str, seed: object, length: int) -> tuple[Any, list[Line], list[Answer]]:
    """Return one random trace whose first rule has this algorithm, with the model's answers. `seed` determines it."""
    draw = Random(f"{algorithm} {seed}")
    rule = random_rules(draw, algorithm)
    pairs = list(traffic(draw, rule, length))
    return rule, [line for line, _ in pairs], [answer for _, answer in pairs]
