"""The numbers of one size of benchmarks.growth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """The numbers of one size.

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
