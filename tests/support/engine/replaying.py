"""A replay by the real scripts, with the same methods as the model's replay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from ratelimits.engine.transport.wire import Wire
from ratelimits.simulate import LineOutcome, Reader, Replay, Simulator, read_rules


def told(outcome: LineOutcome) -> dict[str, Any]:
    """Return an outcome as the object that its JSON decodes to."""
    return {
        "at": outcome.at,
        "allowed": outcome.allowed,
        "wait": outcome.wait / 1_000_000,
        "limit": outcome.limit,
        "remaining": outcome.remaining,
        "retry_after": None if outcome.retry_after is None else outcome.retry_after / 1_000_000,
        "reset_after": outcome.reset_after / 1_000_000,
    }


class EngineReplay:
    """Answer lines one by one, or a whole trace at once, by the scripts on a real server."""

    def __init__(self, wire: Wire, rule: Any) -> None:
        rules = read_rules(rule)
        self.reader, self.replay, self.simulator = Reader(rules), Replay(rules), Simulator(wire)

    def step(self, line: dict[str, Any]) -> dict[str, Any]:
        (answer,) = self.run([line])
        return answer

    def run(self, lines: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        pairs = ((self.replay, self.reader.line(line)) for line in lines)
        return (told(outcome) for _, _, outcome in self.simulator.run(pairs))


@contextmanager
def opening(wire: Wire) -> Iterator[Callable[[Any], EngineReplay]]:
    """Yield a function that opens replays. Close all replays at the end of the block."""
    opened: list[EngineReplay] = []

    def open_replay(rule: Any) -> EngineReplay:
        opened.append(EngineReplay(wire, rule))
        return opened[-1]

    try:
        yield open_replay
    finally:
        for one in opened:
            one.simulator.close()
