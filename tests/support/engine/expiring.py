"""Replay traces on the real scripts with a virtual `now`, while keys expire by the server's real clock."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

from ratelimits.engine import ANY, Limit, algorithm_from_json, decide
from tests.support.engine.asking import NOW

TOLD = ("allowed", "wait", "remaining", "retry_after", "reset_after")


class ExpiringReplay:
    """Answer tries and acquires under one rule. The replay starts at the beginning of a second; states may expire."""

    def __init__(self, rule: Any) -> None:
        self.algorithm = algorithm_from_json(rule)

    def step(self, line: dict[str, Any]) -> dict[str, Any]:
        now = NOW + int(Decimal(line["at"]) * 1_000_000)
        one = Limit("user:1", self.algorithm, cost=line.get("cost", 1))
        decision = decide([one], now=now, timeout=ANY if line.get("op") == "acquire" else 0)
        return {
            name: getattr(decision, name) for name in ("allowed", "wait", "remaining", "retry_after", "reset_after")
        }
