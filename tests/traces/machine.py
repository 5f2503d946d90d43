"""A Hypothesis state machine that compares any replay with the model, line by line."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.reference import Replay as Model
from tests.traces.cases import OpenReplay, Replays
from tests.traces.rules import edited, is_large
from tests.traces.strategies import rules_or_lists
from tests.traces.traffic import Answer, Line, random_cost, random_timeout, scale, us

KEYS = st.sampled_from(("", "a", "b"))
MINUTE = 60_000_000


def machine(opening: Callable[[], OpenReplay]) -> type[RuleBasedStateMachine]:
    """Return a state machine in which a replay of `opening()` must answer every line like the model."""

    class Machine(RuleBasedStateMachine):
        model: Model
        replay: Replays
        rules: Any
        now: int
        answer: Answer

        @initialize(
            rules=rules_or_lists(), start=st.sampled_from((0, 61_000_000, 1_774_745_999_999_999, 1_761_437_000_000_000))
        )
        def begin(self, rules: Any, start: int) -> None:
            self.rules, self.now, self.answer = rules, start, {}
            self.model, self.replay = Model(rules), opening()(rules)

        def play(self, **line: Any) -> None:
            at: Line = {"at": us(self.now), **line}
            self.answer = self.model.step(at)
            assert self.replay.step(at) == self.answer, at

        @rule(key=KEYS, draw=st.randoms(use_true_random=False), op=st.sampled_from(("try_acquire", "acquire", "peek")))
        def ask(self, key: str, draw: Random, op: str) -> None:
            self.play(op=op, key=key, cost=random_cost(draw, self.rules), lease=draw.choice(("", "x")))

        @rule(key=KEYS, draw=st.randoms(use_true_random=False))
        def ask_with_patience(self, key: str, draw: Random) -> None:
            self.play(key=key, cost=random_cost(draw, self.rules), timeout=random_timeout(draw, scale(self.rules)))

        @rule(key=KEYS, op=st.sampled_from(("create", "refund", "release", "reset")), cost=st.integers(0, 3))
        def manage(self, key: str, op: str, cost: int) -> None:
            self.play(op=op, key=key, cost=cost, lease="x")

        @rule(draw=st.randoms(use_true_random=False), key=KEYS)
        def edit(self, draw: Random, key: str) -> None:
            several = self.rules if isinstance(self.rules, list) else [self.rules]
            large = any(is_large(one) for one in several)
            new = [edited(draw, one, large) for one in several]
            self.rules = new if isinstance(self.rules, list) else new[0]
            self.play(op="set_rule", key=key, rule=self.rules)

        @rule(parts=st.integers(0, 30), more=st.integers(-2, 2))
        def wait(self, parts: int, more: int) -> None:
            self.now += max(0, parts * scale(self.rules) // 3 + more)

        @rule(field=st.sampled_from(("retry_after", "reset_after", "wait")), early=st.integers(0, 2))
        def wait_as_told(self, field: str, early: int) -> None:
            self.now += max(0, round((self.answer.get(field) or 0) * 1_000_000) - early)

        @rule(back=st.one_of(st.integers(0, 2 * MINUTE), st.sampled_from((MINUTE, MINUTE + 1, 3600 * 1_000_000))))
        def step_back(self, back: int) -> None:
            self.now = max(0, self.now - back)

    return Machine
