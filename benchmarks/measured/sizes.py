"""The sizes of a project for which benchmarks.growth measures."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """One size of a project: how many rules, overrides and so on it has.

    rules      number of rules in the database
    overrides  number of overrides in the database
    keys       number of live keys: keys whose states are in Redis
    limits     number of limits that apply to each request
    spread     number of users who send the requests, in random order
    """

    name: str
    title: str
    rules: int = 3
    overrides: int = 0
    keys: int = 1
    limits: int = 3
    spread: int = 1
