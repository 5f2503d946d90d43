"""The numbers of one size of benchmarks.growth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Size:
    """The numbers of one size.

    rules      rows in the database
    overrides  rows in the database
    keys       live keys: keys whose states are in Redis
    limits     limits that apply to each request
    spread     number of users from whom the requests come, in random order
    """

    name: str
    title: str
    rules: int = 3
    overrides: int = 0
    keys: int = 1
    limits: int = 3
    spread: int = 1
